"""Layers that never run: the control for skipping them in the prompt alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stageprune.baselines.base import Attachment, Baseline, Calibration
from stageprune.errors import SettingError, UnsupportedModelError
from stageprune.families.decoder import Decoder
from stageprune.methods.prefill_only import LayerRule, PrefillOnlyPruning
from stageprune.prefill.layers import skipped_layers
from stageprune.stages import StageTracker


@dataclass(frozen=True)
class LayerDropping(Baseline):
    """Drops layers in both stages: what prefill-only pruning would be without its stages (arXiv 2602.03295, section 1).

    Args:
        ratio: share of the layers; the count is `floor(ratio * num_hidden_layers)`.
        layers: which: `"last"`, `"first"`, `"interleaved"`, or zero-based indices, as in `PrefillOnlyPruning`.
    """

    kind: ClassVar[str] = "layer-dropping"

    ratio: float = 1 / 3
    layers: LayerRule | Sequence[int] = "last"

    def __post_init__(self) -> None:
        same = PrefillOnlyPruning(self.ratio, self.layers)
        object.__setattr__(self, "ratio", same.ratio)
        object.__setattr__(self, "layers", same.layers)

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        return drop(decoder, skipped_layers(PrefillOnlyPruning(self.ratio, self.layers), len(decoder.layers)), owner)


def drop(decoder: Decoder, layers: Sequence[int], owner: Any) -> Attachment:
    """Let these layers return what they are given. The others move up in the K/V cache, whose first must be used.

    Raises:
        SettingError: if no layer would be left.
        UnsupportedModelError: if the layers do not keep their places in the cache in `self_attn.layer_idx`, or have
            caches of different kinds.
    """
    if len(layers) == len(decoder.layers):
        raise SettingError(f"all {len(layers)} layers would be dropped; keep one at least")
    kinds = set(getattr(decoder.config, "layer_types", None) or ())
    if len(kinds) > 1:
        raise UnsupportedModelError(
            f"layers with caches of different kinds ({', '.join(sorted(kinds))}) cannot move up"
        )
    if decoder.whole:
        raise UnsupportedModelError("the model adds features behind some of its layers (DeepStack)")
    attachment = Attachment(dropped=frozenset(layers))
    remaining = [layer for index, layer in enumerate(decoder.layers) if index not in attachment.dropped]
    places = [(_attention(layer), place) for place, layer in enumerate(remaining)]
    for index in layers:
        attachment.replace(decoder.layers[index], _identity, owner)
    before = [attention.layer_idx for attention, _ in places]

    def move(dense: bool) -> None:
        for (attention, place), own in zip(places, before, strict=True):
            attention.layer_idx = own if dense else place

    attachment.on_switch(move)
    return attachment


def _identity(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return hidden_states


def _attention(layer: nn.Module) -> Any:
    attention = getattr(layer, "self_attn", None)
    if not isinstance(getattr(attention, "layer_idx", None), int):
        raise UnsupportedModelError(f"{type(layer).__name__} has no self_attn.layer_idx, its place in the K/V cache")
    return attention
