"""Where a mixture-of-experts layer keeps its routed experts, and each of them as an FFN of its own.

The module that is described is the one that the router's choice is handed to: it is called with the tokens, the
experts of each and their weights, and returns the weighted sum. transformers 5 stacks the weights of all experts in
one parameter for each projection, whichever implementation (eager, batched, grouped) multiplies with them; others keep
a list of modules. As with every FFN, the description is checked against the module before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

from stageprune.errors import UnsupportedModelError
from stageprune.families.ffn import ACTIVATIONS, FFN, Projection, check_ffn, difference, take_apart

Activation: TypeAlias = Callable[[torch.Tensor], torch.Tensor]

_PLACES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "moe")
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")
_ROUTERS = ("gate", "router")
_PER_TOKEN = ("top_k", "num_experts_per_tok")
_CHECKED_AT_ONCE = 8  # experts; the batched implementation copies the weights of each


@dataclass(frozen=True)
class Experts:
    """The routed experts of one layer.

    Attributes:
        module: what is called with hidden states `[tokens, hidden_size]`, and the experts of each token and their
            weights, `[tokens, per_token]` each.
        experts: each as an FFN, by the router's numbers.
        per_token: how many of them a token uses.
        block: the router, the routed experts and the shared ones.
        shared: the expert that every token uses besides; None if there is none.
    """

    module: nn.Module
    experts: tuple[FFN, ...]
    per_token: int
    block: nn.Module
    shared: FFN | None

    @property
    def intermediate_size(self) -> int:
        """How many channels each expert has."""
        return self.experts[0].intermediate_size

    @property
    def hidden_size(self) -> int:
        """Of the tokens."""
        return int(self.experts[0].down.weight.shape[0])

    @property
    def active_weights(self) -> int:
        """Weights of the routed experts that one token is multiplied with."""
        return active_weights(self.module, self.per_token)

    def __call__(self, hidden_states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """What the module computes, one expert after the other."""
        outputs = torch.zeros_like(hidden_states)
        for expert, tokens, slots in routed(index, len(self.experts)):
            ffn = self.experts[expert]
            one = ffn.down(ffn.hidden(hidden_states[tokens])) * weights[tokens, slots, None]
            outputs.index_add_(0, tokens, one.to(outputs.dtype))
        return outputs


def routed(index: torch.Tensor, count: int) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each of the `count` experts that some token uses, those tokens in order, and in which of their slots it is.

    Args:
        index: the experts of each token, `[tokens, per_token]`.
        count: of experts; higher numbers (other devices' experts) are left out.
    """
    for expert in torch.unique(index).tolist():
        if expert < count:
            tokens, slots = torch.where(index == expert)
            yield expert, tokens, slots


class StackedLinear(nn.Module):
    """One expert's linear layer, inside parameters that hold those of all experts.

    Args:
        owner: the module with the parameters.
        name: of the weights, `[experts, out_features, in_features]`, or with the last two the other way round; the
            biases have the same name and `_bias`, `[experts, out_features]`.
        expert: its number.
        transposed: whether they are the other way round.
    """

    def __init__(self, owner: nn.Module, name: str, expert: int, transposed: bool) -> None:
        super().__init__()
        self._owner = (owner,)  # in a tuple: not a submodule
        self._name = name
        self._expert = expert
        self._transposed = transposed
        self.out_features, self.in_features = self.weight.shape

    @property
    def weight(self) -> torch.Tensor:
        """`[out_features, in_features]`."""
        weight: torch.Tensor = getattr(self._owner[0], self._name)[self._expert]
        return weight.T if self._transposed else weight

    @property
    def bias(self) -> torch.Tensor | None:
        """`[out_features]`, or None."""
        biases = getattr(self._owner[0], f"{self._name}_bias", None)
        return None if biases is None else biases[self._expert]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs, `[..., out_features]`."""
        return F.linear(inputs, self.weight, self.bias)


def find_experts(layer: nn.Module) -> tuple[nn.Module, nn.Module] | None:
    """The block of router and experts in a decoder layer, and its module of routed experts; None if it has none."""
    for place in _PLACES:
        block = getattr(layer, place, None)
        if isinstance(block, nn.Module) and is_block(block):
            return block, block.experts  # type: ignore[return-value]
    return None


def is_block(module: Any) -> bool:
    """Whether this module has routed experts."""
    return isinstance(module, nn.Module) and isinstance(getattr(module, "experts", None), nn.Module)


def experts_per_token(block: Any) -> int:
    """How many routed experts a token uses.

    Raises:
        UnsupportedModelError: if neither the block, its router nor the configuration says it.
    """
    routers = [getattr(block, name, None) for name in _ROUTERS]
    for holder in (*routers, block, getattr(block, "config", None), getattr(block.experts, "config", None)):
        for name in _PER_TOKEN:
            value = getattr(holder, name, None)
            if isinstance(value, int) and not isinstance(value, bool):
                return value
    raise UnsupportedModelError(f"{type(block).__name__} does not say how many experts a token uses (top_k)")


def active_weights(experts: nn.Module, per_token: int) -> int:
    """Weights of matrix products inside `per_token` experts of a module that holds all of them alike."""
    stacked = [parameter for parameter in experts.parameters(recurse=False) if parameter.ndim == 3]
    if stacked:
        return per_token * sum(parameter[0].numel() for parameter in stacked)
    one = next(experts.children(), None)
    shapes = [] if one is None else [(getattr(part, "in_features", 0), getattr(part, "out_features", 0))
                                     for part in one.modules()]  # fmt: skip
    return per_token * sum(rows * columns for columns, rows in shapes)


def describe_experts(index: int, layer: nn.Module) -> Experts | None:
    """Find and check the routed experts of a decoder layer; None if it has none.

    Raises:
        UnsupportedModelError: if no description fits; names the layer and the difference.
    """
    found = find_experts(layer)
    if found is None:
        return None
    block, module = found
    name = f"layer {index} ({type(layer).__name__})"
    if type(module).forward is nn.Module.forward:
        raise UnsupportedModelError(
            f"{name}: its {type(block).__name__} calls the experts one by one; known are modules of experts "
            "that are called once, with the tokens, the experts of each and their weights"
        )
    experts = _stacked(module) if getattr(module, "gate_up_proj", None) is not None else _listed(module)
    if experts is None:
        raise UnsupportedModelError(
            f"{name}: no description fits its experts ({type(module).__name__}); known are stacked gate_up_proj and "
            "down_proj parameters with an activated gate or GPT-OSS's clamped one, and lists of modules with gate, up "
            "and down projections"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise UnsupportedModelError(f"{name}: its experts are spread over several processes (expert parallelism)")
    shared = next((part for part in (getattr(block, name, None) for name in _SHARED) if part is not None), None)
    described = None if shared is None else take_apart(shared)
    result = Experts(module, experts, experts_per_token(block), block, described)
    _check(name, result)
    if described is not None:
        check_ffn(name, described)
    return result


def _stacked(module: Any) -> tuple[FFN, ...] | None:
    weights = module.gate_up_proj, getattr(module, "down_proj", None)
    activations = _activations(module)
    if activations is None or not all(isinstance(weight, torch.Tensor) and weight.ndim == 3 for weight in weights):
        return None
    experts = tuple(_stacked_expert(module, expert, activations) for expert in range(len(weights[0])))
    return experts if _gates_agree(module, experts[0]) else None


def _stacked_expert(module: Any, expert: int, activations: tuple[Activation, Activation | None]) -> FFN:
    transposed = getattr(module, "is_transposed", False)
    both = StackedLinear(module, "gate_up_proj", expert, transposed)
    down = StackedLinear(module, "down_proj", expert, transposed)
    half = both.out_features // 2
    rows = slice(0, half), slice(half, None)
    if not getattr(module, "is_concatenated", True):
        rows = slice(0, None, 2), slice(1, None, 2)
    gate, up = (Projection(both, part) for part in rows)
    return FFN(module, gate, up, Projection(down), *activations)


def _activations(module: Any) -> tuple[Activation, Activation | None] | None:
    """Of the gate, and of the up projection where it has one."""
    act = next((found for name in ACTIVATIONS if callable(found := getattr(module, name, None))), None)
    if act is not None:
        return act, None
    alpha, limit = getattr(module, "alpha", None), getattr(module, "limit", None)
    return None if alpha is None or limit is None else (_ClampedGate(alpha, limit), _ClampedUp(limit))


@dataclass(frozen=True)
class _ClampedGate:
    """The gate of GPT-OSS."""

    alpha: float
    limit: float

    def __call__(self, gate: torch.Tensor) -> torch.Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(gate * self.alpha)


@dataclass(frozen=True)
class _ClampedUp:
    """What the gate of GPT-OSS is multiplied with."""

    limit: float

    def __call__(self, up: torch.Tensor) -> torch.Tensor:
        return up.clamp(-self.limit, self.limit) + 1


@torch.no_grad()
def _gates_agree(module: Any, ffn: FFN) -> bool:
    """Whether a gate of the module's own is ours, also for values that a few random tokens would not reach."""
    own = getattr(module, "_apply_gate", None)
    if own is None or ffn.gate is None:
        return True
    values = torch.tensor([-1e3, -9.0, -6.0, -1.0, -0.1, 0.0, 0.1, 1.0, 6.0, 9.0, 1e3])
    gate, up = (part[:, None] for part in torch.cartesian_prod(values, values).unbind(1))
    both = torch.empty(len(gate), int(ffn.up.linear.out_features))  # type: ignore[arg-type]
    both[:, ffn.gate.rows], both[:, ffn.up.rows] = gate, up
    ours = ffn.act(gate) * (up if ffn.up_act is None else ffn.up_act(up))
    theirs = own(both)
    return bool(torch.allclose(theirs, ours.expand_as(theirs), rtol=1e-5))


def _listed(module: nn.Module) -> tuple[FFN, ...] | None:
    found = [take_apart(expert) for expert in module.children()]
    experts = tuple(ffn for ffn in found if ffn is not None)
    return experts if experts and len(experts) == len(found) else None


@torch.no_grad()
def _check(name: str, experts: Experts) -> None:
    """Every expert, for one token each, against the module itself."""
    weight = next(experts.module.parameters())
    if weight.device.type == "meta":
        return  # offloaded: nothing to compute with here
    generator = torch.Generator().manual_seed(0)
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    for start in range(0, len(experts.experts), _CHECKED_AT_ONCE):
        index = torch.arange(start, min(start + _CHECKED_AT_ONCE, len(experts.experts)), device=weight.device)[:, None]
        inputs = torch.randn(len(index), experts.hidden_size, generator=generator).to(weight.device, dtype)
        shares = torch.rand(len(index), 1, generator=generator).to(weight.device, dtype) + 0.5
        found = difference(experts(inputs, index, shares), experts.module(inputs, index, shares), weight.dtype)
        if found is not None:
            raise UnsupportedModelError(
                f"{name}: its experts ({type(experts.module).__name__}) {found}; the description begins to differ at "
                f"one of the experts {start} to {start + len(index) - 1}"
            )
