"""A layer's K/V projection with other linear layers than its own, and how its own are read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stageprune.errors import UnsupportedModelError
from stageprune.families.kv import KeysValues, KVProjection
from stageprune.families.verify import VerifiedLayer

_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "addmm")
_SCALE = 2.0**100
_TOLERANCE = 0.02  # quantized layers round what they read


class FittedProjection(KVProjection):
    """A layer's K/V projection with fitted linear layers: one matrix for keys and values, and a bias.

    Args:
        base: the layer's own.
        weight: `[features, hidden_size]`, keys first.
        bias: `[features]`.
        keys: how many features are keys.
    """

    def __init__(self, base: KVProjection, weight: torch.Tensor, bias: torch.Tensor, keys: int) -> None:
        self._base = base
        self._weight = weight
        self._bias = bias
        self._keys = keys

    @property
    def nbytes(self) -> int:
        """Memory of the fitted weights."""
        return self._weight.nbytes + self._bias.nbytes

    def normed(self, layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `KVProjection`."""
        return self._base.normed(layer, hidden_states)

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """See `KVProjection`."""
        features = F.linear(normed, self._weight, self._bias)
        return features[..., : self._keys], features[..., self._keys :]

    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """See `KVProjection`."""
        return self._base.finish(layer, keys, values, positions)

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        return self._weight.numel()


@dataclass(frozen=True)
class OwnWeights:
    """The linear layers of a K/V projection as one.

    Attributes:
        weight: `[features, hidden_size]`, keys first, float64.
        bias: `[features]`, float64; 0 where there is none.
        keys: how many features are keys.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    keys: int


@torch.no_grad()
def own_weights(one: VerifiedLayer) -> OwnWeights:
    """Read the layer's own linear layers off their answers, which works for every shape of attention.

    Products are computed in float64, so what comes out is what the layer holds, in whatever type.

    Raises:
        UnsupportedModelError: if the layer does not answer as a linear layer does.
    """
    device = exact_device(one.device)
    zeros = torch.zeros(1, 1, one.hidden_size, device=device, dtype=torch.float64)
    # So large that a bias, which may be much larger than the weights, is lost in rounding beside them.
    unit = torch.eye(one.hidden_size, device=device, dtype=torch.float64)[None] * _SCALE
    probe = torch.linspace(-1, 1, one.hidden_size, device=device, dtype=torch.float64)[None, None]
    try:
        with _Exact():
            keys, values = one.project.linear(one.layer, zeros)
            bias = torch.cat((keys, values), dim=-1)[0, 0].to(device, torch.float64)
            answers = torch.cat(one.project.linear(one.layer, unit), dim=-1)[0].to(device, torch.float64)
            weight = ((answers - bias) / _SCALE).T.contiguous()
            expected = torch.cat(one.project.linear(one.layer, probe), dim=-1)[0, 0].to(device, torch.float64)
    except (RuntimeError, TypeError, NotImplementedError) as error:
        raise UnsupportedModelError(f"layer {one.index}: its K/V weights cannot be read: {error}") from error
    off = float((weight @ probe[0, 0] + bias - expected).abs().max())
    if not off <= _TOLERANCE * float(expected.abs().max()):
        raise UnsupportedModelError(
            f"layer {one.index}: its K/V weights cannot be read: they do not answer as a linear layer does (quantized?)"
        )
    return OwnWeights(weight, bias, keys.shape[-1])


def exact_device(device: torch.device) -> torch.device:
    """This device, or the CPU if it has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


class _Exact(TorchFunctionMode):
    """Matrix products with a float64 factor are computed in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") in _PRODUCTS:
            tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            if any(value.dtype == torch.float64 for value in tensors):
                args = tuple(map(_double, args))
                kwargs = {name: _double(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
