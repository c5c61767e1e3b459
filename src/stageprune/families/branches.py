"""Where the two residual branches of a decoder layer end: the modules whose outputs the layer adds to its input.

A layer computes `y = x + Attn(x)`, `x' = y + FFN(y)` (Eq. 1 of arXiv 2602.03295), or both branches on `x` (parallel
blocks). `Attn` and `FFN` are whole branches: norms behind them (Gemma, OLMo2, GLM4) belong to them. In one architecture
`post_attention_layernorm` ends the attention branch, in another it begins the FFN, so no name is believed: for each
pair of candidates it is checked in the layer itself that scaling their outputs does what Eq. 5 says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.families.calls import LayerSignature
from stageprune.families.decoder import Decoder
from stageprune.families.probe import probe_layers
from stageprune.overrides import MethodOverride

# Norms behind a branch first: a gate in front of such a norm is undone by it, yet still 0 at 0 and 1 at 1.
_ATTENTION = (
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "self_attn",
    "attention",
    "self_attention",
    "attn",
)
_FFN = (
    "post_mlp_layernorm",
    "post_feedforward_layernorm",
    "mlp",
    "feed_forward",
    "ffn",
    "block_sparse_moe",
)
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 0.05


@dataclass(frozen=True)
class Branches:
    """The residual branches of one decoder layer.

    Attributes:
        layer: the module.
        attention: its output, or the first of its outputs, is what the layer adds for attention.
        ffn: likewise for the feed-forward network.
    """

    layer: nn.Module
    attention: nn.Module
    ffn: nn.Module


Gate = Callable[[int], torch.Tensor | None]
"""From a number of rows to the gate of each, `[batch or 1, rows]`; None for an untouched branch."""


def gate_branch(module: nn.Module, gate: Gate) -> MethodOverride:
    """Multiply a branch's output with a gate from now on, until the override is removed.

    The product is taken in the gate's precision and rounded back, so that a gate of 1 changes nothing.
    """

    def gated(forward: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = forward(*args, **kwargs)
        branch = _first(outputs)
        if not isinstance(branch, torch.Tensor) or branch.ndim != 3:
            raise UnsupportedModelError(f"{type(module).__name__} returns no [batch, length, hidden_size] to gate")
        values = gate(branch.shape[1])
        if values is None:
            return outputs
        product = (branch.to(values.dtype) * values.to(branch.device)[..., None]).to(branch.dtype)
        return (product, *outputs[1:]) if isinstance(outputs, tuple) else product

    return MethodOverride(module, "forward", gated)


@torch.no_grad()
def find_branches(decoder: Decoder) -> tuple[Branches, ...]:
    """The branches of every layer, each checked on a few tokens that go through the model.

    Raises:
        UnsupportedModelError: names the first layer where no pair of modules is the two branches, and why.
    """
    found: dict[int, Branches] = {}
    count = len(decoder.layers)
    probe_layers(decoder, {index: _Finder(decoder, index, found) for index in range(count)}, found)
    return tuple(found[index] for index in range(count))


class _Finder:
    """Stands in for one layer's forward during the search, and returns what the layer returns."""

    def __init__(self, decoder: Decoder, index: int, found: dict[int, Branches]) -> None:
        self._index = index
        self._layer = decoder.layers[index]
        self._signature = LayerSignature(self._layer, decoder.config)
        self._found = found

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(args, kwargs)
        output = forward(*args, **kwargs)
        name = f"layer {self._index} ({type(self._layer).__name__})"
        arrived = call.arguments.get("hidden_states")
        if not isinstance(arrived, torch.Tensor) or arrived.ndim != 3:
            raise UnsupportedModelError(f"{name}: it is not called with hidden_states of [batch, length, hidden_size]")
        problems = []
        for branches in _candidates(self._layer):
            problem = _Probe(branches, arrived, lambda: forward(*args, **kwargs), output).problem()
            if problem is None:
                self._found[self._index] = branches
                return output
            pair = f"{type(branches.attention).__name__} and {type(branches.ffn).__name__}"
            problems.append(f"{pair}: {problem}")
        tried = "; ".join(problems) or "it has no module with a name that we know"
        raise UnsupportedModelError(f"{name}: its attention and FFN branches were not found. {tried}")


def _candidates(layer: nn.Module) -> Iterator[Branches]:
    attentions, ffns = (
        [part for place in places if isinstance(part := getattr(layer, place, None), nn.Module)]
        for places in (_ATTENTION, _FFN)
    )
    for attention, ffn in product(attentions, ffns):
        yield Branches(layer, attention, ffn)


@dataclass(frozen=True)
class _Probe:
    """Runs a layer with gates on a pair of candidates, and compares with Eq. 5.

    With an attention gate `a` and an FFN gate `f` per row, the output must be the input at `a = f = 0`, untouched at
    `a = f = 1`, and linear in `a` (without FFN) and in `f` (at any `a`).
    """

    branches: Branches
    arrived: torch.Tensor
    run: Callable[[], Any]
    untouched: Any

    def problem(self) -> str | None:
        """What speaks against the candidates; None if nothing does."""
        try:
            return self._problem()
        except (UnsupportedModelError, TypeError, ValueError, RuntimeError) as error:
            return str(error)

    def _problem(self) -> str | None:
        x = self.arrived
        if not torch.equal(self._output(0, 0), x):
            return "with both at 0, the layer does not return its input"
        if not torch.equal(self._output(1, 1), _first(self.untouched)):
            return "with both at 1, the layer does not return its output"
        large, part = _revealing(x, self._output(1, 0)), _parts(x)
        at_gates = self._output(part * large, 0)
        if not _close(at_gates, _between(part, x, self._output(large, 0))):
            return "the output does not grow in proportion to the first"
        gates = part * large
        large = _revealing(at_gates, self._output(gates, 1))
        if not _close(self._output(gates, part * large), _between(part, at_gates, self._output(gates, large))):
            return "the output does not grow in proportion to the second"
        return None

    def _output(self, attention: float | torch.Tensor, ffn: float | torch.Tensor) -> torch.Tensor:
        with self._gates(attention, ffn):
            return _first(self.run())

    @contextmanager
    def _gates(self, attention: float | torch.Tensor, ffn: float | torch.Tensor) -> Iterator[None]:
        rows = torch.ones(self.arrived.shape[:-1], dtype=gate_dtype(self.arrived), device=self.arrived.device)
        pairs = ((self.branches.attention, rows * attention), (self.branches.ffn, rows * ffn))
        active = [gate_branch(module, lambda _, values=values: values) for module, values in pairs]  # type: ignore[misc]
        try:
            yield
        finally:
            for override in reversed(active):
                override.remove()


def gate_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The precision of gates and sums for weights or hidden states of some precision: float32 at least."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _first(output: Any) -> torch.Tensor:
    hidden_states: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return hidden_states


def _revealing(without: torch.Tensor, with_branch: torch.Tensor) -> torch.Tensor:
    """A gate for each row, so large that the gated branch is as large as the stream it is added to.

    At a gate of 1 a small branch could hide in the stream's rounding, and a wrong place with it.
    """
    branch = (with_branch - without).abs().amax(-1).to(gate_dtype(without))
    ratio = without.abs().amax(-1).to(branch.dtype) / branch
    return torch.where(branch > 0, ratio, 1).clamp(max=1e3)


def _parts(rows: torch.Tensor) -> torch.Tensor:
    """A different share of the large gate for each row."""
    length = rows.shape[1]
    signs = torch.tensor([1.0, -1.0]).repeat(length)[:length]
    return (signs * torch.linspace(0.5, 0.9, length)).to(rows.device, gate_dtype(rows))


def _between(part: torch.Tensor, start: torch.Tensor, end: torch.Tensor) -> torch.Tensor:
    return start + part[..., None] * (end - start)


def _close(ours: torch.Tensor, expected: torch.Tensor) -> bool:
    tolerance = _TOLERANCE.get(ours.dtype, _LOW_PRECISION_TOLERANCE)
    allowed = tolerance * expected.abs().amax(-1, keepdim=True).double()
    return bool(((ours.double() - expected.double()).abs() <= allowed).all())
