"""How much attention each token's key and value get, head by head, while the full model reads text.

An error in a value counts as much as the attention that the token gets: the output of attention is the sum of values
weighted by the probabilities A. An error d in a logit changes A by about A (1 - A) d, which is what an error in a key
counts. Both are summed over all later queries, and over the query heads that share a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.overrides import MethodOverride

_NAMES = ("self_attn", "attention", "self_attention", "attn")


@dataclass(frozen=True)
class Mass:
    """Of one layer, `[num_key_value_heads, tokens]`, float32 or better.

    Attributes:
        keys: sum of `A (1 - A)` over later queries.
        values: sum of A over later queries.
    """

    keys: torch.Tensor
    values: torch.Tensor


@contextmanager
def attention_mass(model: Any, layers: Mapping[int, nn.Module], heads: int) -> Iterator[dict[int, Mass]]:
    """The attention in forward passes inside the block, by layer; each pass replaces what the one before gave.

    Inside, the model computes attention eagerly: other implementations never have the probabilities. Memory is that of
    one layer's probabilities.

    Args:
        model: that is run with a single sequence and no padding.
        layers: to watch, by index.
        heads: that keys and values have.

    Raises:
        UnsupportedModelError: in the block, if a layer's attention does not return its probabilities.
    """
    found: dict[int, Mass] = {}

    def watch(index: int, layer: nn.Module) -> MethodOverride:
        def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
            outputs = forward(*args, **kwargs)
            found[index] = _mass(index, outputs, heads)
            return outputs

        return MethodOverride(_attention(index, layer), "forward", call)

    before = model.config._attn_implementation
    overrides = [watch(index, layer) for index, layer in layers.items()]
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


def _mass(index: int, outputs: Any, heads: int) -> Mass:
    probabilities = outputs[1] if isinstance(outputs, tuple) and len(outputs) > 1 else None
    if not isinstance(probabilities, torch.Tensor) or probabilities.ndim != 4 or probabilities.shape[1] % heads:
        raise UnsupportedModelError(
            f"layer {index}: its attention returns no probabilities for {heads} key/value heads, so tokens cannot be "
            "weighted by them; weight them equally"
        )
    _, query_heads, queries, tokens = probabilities.shape
    if queries != tokens:
        raise UnsupportedModelError(f"layer {index}: attention over {tokens} tokens from {queries}; expected as many")
    # One query head after the other: in float32 and with temporaries, all at once would be several times the memory.
    zeros = torch.zeros(heads, tokens, dtype=torch.promote_types(probabilities.dtype, torch.float32))
    mass = Mass(zeros, zeros.clone())
    for head in range(query_heads):
        later = probabilities[0, head].to(zeros.dtype).tril(-1)
        group = head * heads // query_heads
        mass.values[group] += later.sum(0).cpu()
        mass.keys[group] += (later * (1 - later)).sum(0).cpu()
    return mass
