"""How much attention each token gets while the full model reads text: what an error in its key or value counts.

The output of attention is the sum of the values weighted by the probabilities A. So an error in a token's value counts
as much as the attention that later tokens pay to it; and so, nearly, does one in its key, since an error d in a logit
changes its probability by about A (1 - A) d.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.overrides import MethodOverride

_NAMES = ("self_attn", "attention", "self_attention", "attn")


@contextmanager
def attention_mass(model: Any, layers: Mapping[int, nn.Module]) -> Iterator[dict[int, torch.Tensor]]:
    """Collect the attention that tokens get from later ones, in forward passes inside the block.

    Inside, the model computes attention eagerly: other implementations never have the probabilities. Memory is that of
    one layer's probabilities.

    Args:
        model: that reads text without padding.
        layers: to watch, by index; without any, the model is left as it is.

    Yields:
        By layer the sum of the probabilities over later tokens and all heads, `[batch, length]`, float32 or better;
        each pass replaces what the one before gave.

    Raises:
        UnsupportedModelError: in the block, if a layer's attention does not return its probabilities.
    """
    found: dict[int, torch.Tensor] = {}

    def watch(index: int, module: nn.Module) -> MethodOverride:
        def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            found[index] = _mass(index, outputs)
            return outputs

        return MethodOverride(module, "forward", call)

    if not layers:
        yield found
        return
    attention = {index: _attention(index, layer) for index, layer in layers.items()}
    before = model.config._attn_implementation
    overrides = [watch(index, module) for index, module in attention.items()]
    try:
        model.set_attn_implementation("eager")
        yield found
    finally:
        model.set_attn_implementation(before)
        for override in overrides:
            override.remove()


def _attention(index: int, layer: nn.Module) -> nn.Module:
    for name in _NAMES:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    raise UnsupportedModelError(f"layer {index} has no attention among {', '.join(_NAMES)}")


def _mass(index: int, outputs: Any) -> torch.Tensor:
    probabilities = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else None
    if not isinstance(probabilities, torch.Tensor) or probabilities.ndim != 4:
        raise UnsupportedModelError(
            f"layer {index}: its attention returns no probabilities, so tokens cannot be weighted by them; weight them "
            "equally (--weights equal)"
        )
    dtype = torch.promote_types(probabilities.dtype, torch.float32)
    # One head after the other: copies of all at once would be several times the memory.
    return torch.stack([head.to(dtype).tril(-1).sum(-2) for head in probabilities.unbind(1)]).sum(0)
