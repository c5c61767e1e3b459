"""Check the description of each layer against the layer itself, before anything relies on it.

A few tokens go through the model as they always do. In each layer to verify, the keys and values that the layer hands
to its cache are compared with those of the candidate descriptions, and its output for the last rows with what comes
out when only these rows run behind projected keys and values. So a misdescribed architecture, a patched attention or
an argument whose rows we would select wrongly is found when pruning begins, not in the output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.families.caches import PrefixedCache, RecordingCache
from stageprune.families.calls import LayerCall, LayerSignature
from stageprune.families.decoder import Decoder, refuse_recurrent, refuse_shared_kv
from stageprune.families.kv import KVProjection, candidates
from stageprune.families.probe import LENGTH, probe_layers

_PREFILL = 3
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_LOW_PRECISION_TOLERANCE = 0.03


@dataclass(frozen=True)
class VerifiedLayer:
    """What is known of one decoder layer.

    Attributes:
        index: zero-based.
        layer: the module.
        project: its keys and values from the hidden states that enter it.
        signature: the arguments of its forward.
        extra_outputs: how many outputs follow the hidden states (0: it returns a bare tensor).
        hidden_size: of what enters it.
        dtype: of its keys and values.
        device: where it computes them.
    """

    index: int
    layer: nn.Module
    project: KVProjection
    signature: LayerSignature
    extra_outputs: int
    hidden_size: int
    dtype: torch.dtype
    device: torch.device


def check_structure(decoder: Decoder, indices: Iterable[int]) -> None:
    """The part of the check that needs no weights, for models of which only the configuration is at hand.

    Raises:
        UnsupportedModelError: names the first layer that cannot be skipped, and why.
    """
    refuse_shared_kv(decoder.config)
    for index in indices:
        layer = decoder.layers[index]
        refuse_recurrent(index, layer)
        if next(candidates(layer), None) is None:
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}): no description fits its attention; known are self_attn with "
                "k_proj and v_proj, or a fused qkv_proj or query_key_value"
            )


@torch.no_grad()
def verify_layers(decoder: Decoder, indices: Iterable[int]) -> dict[int, VerifiedLayer]:
    """Find and check the description of these layers.

    Raises:
        UnsupportedModelError: names the first layer that no description fits, and the difference.
    """
    indices = list(indices)
    check_structure(decoder, indices)
    verified: dict[int, VerifiedLayer] = {}
    probe_layers(decoder, {index: _Verifier(decoder, index, verified) for index in indices}, verified)
    return verified


class _Verifier:
    """Stands in for one layer's forward during the check, and returns what the layer returns."""

    def __init__(self, decoder: Decoder, index: int, verified: dict[int, VerifiedLayer]) -> None:
        self._index = index
        self._layer = decoder.layers[index]
        self._signature = LayerSignature(self._layer, decoder.config)
        self._verified = verified
        self._name = f"layer {index} ({type(self._layer).__name__})"

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call = self._signature.bind(args, kwargs)
        cache = RecordingCache()
        output = forward(**call.decode_rows(call.hidden_states, cache, 0, LENGTH))
        if cache.keys is None or cache.values is None:
            raise UnsupportedModelError(f"{self._name} hands no keys and values to its cache")
        project = self._matching(call, cache)
        extra = len(output) - 1 if isinstance(output, tuple) else 0
        self._check_decode_rows(forward, call, cache, output)
        size, keys = call.hidden_states.shape[-1], cache.keys
        self._verified[self._index] = VerifiedLayer(
            self._index, self._layer, project, self._signature, extra, size, keys.dtype, keys.device
        )
        return output

    def _matching(self, call: LayerCall, cache: RecordingCache) -> KVProjection:
        positions = call.positions(slice(0, LENGTH), LENGTH)
        differences = []
        for project in candidates(self._layer):
            try:
                keys, values = project(self._layer, call.hidden_states, positions)
            except (AttributeError, TypeError, ValueError, RuntimeError) as error:
                differences.append(f"{project}: {error}")
                continue
            difference = _difference("keys", keys, cache.keys) or _difference("values", values, cache.values)
            if not difference:
                return project
            differences.append(f"{project}: {difference}")
        raise UnsupportedModelError(
            f"{self._name}: its own keys and values do not agree with any description of its architecture. "
            + "; ".join(differences)
        )

    def _check_decode_rows(self, forward: Any, call: LayerCall, cache: RecordingCache, output: Any) -> None:
        assert cache.keys is not None
        assert cache.values is not None
        prefix = PrefixedCache(None, cache.keys[..., :_PREFILL, :], cache.values[..., :_PREFILL, :])
        rows = call.hidden_states[:, _PREFILL:]
        part = forward(**call.decode_rows(rows, prefix, _PREFILL, LENGTH))
        part, whole = (out[0] if isinstance(out, tuple) else out for out in (part, output))
        difference = _difference("outputs", part, whole[:, _PREFILL:])
        if difference:
            raise UnsupportedModelError(
                f"{self._name}: its last rows come out differently when they run behind projected keys and values: "
                f"{difference}"
            )


def _difference(what: str, ours: torch.Tensor, theirs: torch.Tensor | None) -> str | None:
    """A description of how far apart two tensors are, or None if they agree to rounding."""
    assert theirs is not None
    if ours.shape != theirs.shape:
        return f"{what} have shape {tuple(ours.shape)} instead of {tuple(theirs.shape)}"
    scale = theirs.abs().max().double().item()
    off = (ours.double() - theirs.double()).abs().max().item()
    allowed = _TOLERANCE.get(theirs.dtype, _LOW_PRECISION_TOLERANCE) * scale
    if off <= allowed:
        return None
    return f"{what} differ by up to {off:.3g} where the largest is {scale:.3g} (allowed: {allowed:.1g})"
