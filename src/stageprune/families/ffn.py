"""Where the feed-forward network of each architecture keeps its gate, up and down projections.

Every supported FFN is `down(act(gate(x)) * up(x))`, or without a gate `down(act(up(x)))`. As with keys and values, the
description is checked against the module before anything relies on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stageprune.errors import UnsupportedModelError

_PLACES = ("mlp", "feed_forward", "ffn")
_GATED = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
_FUSED = (("gate_up_proj", "down_proj"),)
_UNGATED = (
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("c_fc", "c_proj"),
    ("fc1", "fc2"),
    ("lin1", "lin2"),
)
_PLAIN = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("act_fn", "activation_fn", "act", "activation")


@dataclass(frozen=True)
class Projection:
    """A linear layer, or a range of its output features where gate and up share one.

    Args:
        linear: the layer.
        rows: the range of output features; None for all.
    """

    linear: nn.Module
    rows: slice | None = None

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The outputs, `[..., features]`, through the module's own forward."""
        outputs: torch.Tensor = self.linear(inputs)
        return outputs if self.rows is None else outputs[..., self.rows]

    @property
    def weight(self) -> torch.Tensor:
        """`[features, inputs]`."""
        weight = self.linear.weight
        assert isinstance(weight, torch.Tensor)
        return weight if self.rows is None else weight[self.rows]

    @property
    def bias(self) -> torch.Tensor | None:
        """`[features]`, or None."""
        bias = self.linear.bias
        if bias is None:
            return None
        assert isinstance(bias, torch.Tensor)
        return bias if self.rows is None else bias[self.rows]

    @property
    def plain(self) -> bool:
        """Whether the weight can be read directly: no quantization, adapter, hook or offloading in between."""
        linear = self.linear
        return (
            isinstance(linear, nn.Linear)
            and linear.weight.dtype in _PLAIN
            and "forward" not in vars(linear)
            and not linear._forward_hooks
            and not linear._forward_pre_hooks
            and linear.weight.device.type != "meta"
        )


@dataclass(frozen=True)
class FFN:
    """A feed-forward network, taken apart.

    Attributes:
        module: what the decoder layer calls.
        gate: None where there is no gate.
        up: from `hidden_size` to `intermediate_size`.
        down: back.
        act: the activation, of the gate where there is one.
        up_act: what is done to the up projection's output before the gate is multiplied with it; None: nothing.
    """

    module: nn.Module
    gate: Projection | None
    up: Projection
    down: Projection
    act: Callable[[torch.Tensor], torch.Tensor]
    up_act: Callable[[torch.Tensor], torch.Tensor] | None = None

    @property
    def intermediate_size(self) -> int:
        """How many channels there are."""
        return int(self.down.weight.shape[1])

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input of the down projection, `[..., intermediate_size]`."""
        return self.hidden_and_up(inputs)[0]

    def hidden_and_up(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the down projection, and the output of the up projection, `[..., intermediate_size]` each."""
        if self.gate is None:
            up = self.up(inputs)
            return self.act(up), up
        gated, up = self.gated_and_up(inputs)
        return gated * up, up

    def gated_and_up(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The activated gate (there must be one), and the output of the up projection, `[..., intermediate_size]`."""
        assert self.gate is not None
        if self.gate.linear is self.up.linear:
            both = self.gate.linear(inputs)
            gate, up = both[..., self.gate.rows], both[..., self.up.rows]
        else:
            gate, up = self.gate(inputs), self.up(inputs)
        return self.act(gate), up if self.up_act is None else self.up_act(up)

    @property
    def plain(self) -> bool:
        """Whether all weights can be read directly."""
        parts = [self.up, self.down] + ([self.gate] if self.gate else [])
        return all(part.plain for part in parts)


def describe_ffn(index: int, layer: nn.Module) -> FFN:
    """Find and check the FFN of a decoder layer.

    Raises:
        UnsupportedModelError: if no description fits; names the layer and the difference.
    """
    name = f"layer {index} ({type(layer).__name__})"
    module = next((found for place in _PLACES if isinstance(found := getattr(layer, place, None), nn.Module)), None)
    ffn = None if module is None else take_apart(module)
    if ffn is None:
        raise UnsupportedModelError(
            f"{name}: no description fits its FFN{'' if module is None else f' ({type(module).__name__})'}; known are "
            "gate/up/down projections, a fused gate_up_proj, and ungated pairs"
        )
    check_ffn(name, ffn)
    return ffn


def take_apart(module: Any) -> FFN | None:
    """The FFN inside this module, by the names of its parts; None if no description fits."""
    act = next((found for name in ACTIVATIONS if callable(found := getattr(module, name, None))), None)
    if act is None:
        return None
    for gate, up, down in _GATED:
        if all(hasattr(module, part) for part in (gate, up, down)):
            return FFN(
                module, Projection(getattr(module, gate)), Projection(getattr(module, up)),
                Projection(getattr(module, down)), act,
            )  # fmt: skip
    for fused, down in _FUSED:
        if hasattr(module, fused) and hasattr(module, down):
            both = getattr(module, fused)
            half = both.out_features // 2
            gate_half, up_half = Projection(both, slice(0, half)), Projection(both, slice(half, None))
            return FFN(module, gate_half, up_half, Projection(getattr(module, down)), act)
    for up, down in _UNGATED:
        if hasattr(module, up) and hasattr(module, down):
            return FFN(module, None, Projection(getattr(module, up)), Projection(getattr(module, down)), act)
    return None


@torch.no_grad()
def check_ffn(name: str, ffn: FFN) -> None:
    """Compare the description with the module's own output.

    Raises:
        UnsupportedModelError: if they differ; `name` says where.
    """
    weight = next(ffn.module.parameters())
    if weight.device.type == "meta":
        return  # offloaded: nothing to compute with here
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(1, 3, ffn.up.linear.in_features, generator=generator)  # type: ignore[call-overload]
    inputs = inputs.to(weight.device, weight.dtype if weight.is_floating_point() else torch.float32)
    found = difference(ffn.down(ffn.hidden(inputs)), ffn.module(inputs), weight.dtype)
    if found is not None:
        raise UnsupportedModelError(f"{name}: its FFN ({type(ffn.module).__name__}) {found}")


def difference(ours: torch.Tensor, theirs: Any, dtype: torch.dtype) -> str | None:
    """What is wrong with a description, or None if it agrees with the module's own output to rounding.

    Args:
        ours: the description's output.
        theirs: the module's.
        dtype: of its weights.
    """
    if not isinstance(theirs, torch.Tensor) or theirs.shape != ours.shape:
        return "returns something else than ours"
    off, scale = (ours - theirs).abs().max().item(), theirs.abs().max().item()
    if not torch.isfinite(ours).all():
        return "has weights that are not finite"
    if not off <= (1e-5 if dtype in (torch.float32, torch.float64) else 0.03) * scale:
        return f"differs from its description by up to {off:.3g} where the largest output is {scale:.3g}"
    return None


def activation_name(act: Any) -> str | None:
    """What kernels call this activation; None if they do not know it."""
    probe = torch.linspace(-4, 4, 33, dtype=torch.float64)
    known: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
        "gelu": F.gelu,
        "relu": F.relu,
    }
    ours = act(probe)
    return next((name for name, function in known.items() if torch.allclose(function(probe), ours, atol=1e-9)), None)
