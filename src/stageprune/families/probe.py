"""A few tokens through a model, with something in front of its layers that looks at how they are called."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch

from stageprune.errors import UnsupportedModelError
from stageprune.families.calls import execution_device
from stageprune.families.decoder import Decoder
from stageprune.overrides import MethodOverride

LENGTH = 5
"""Tokens of the probe."""


def probe_layers(decoder: Decoder, observers: Mapping[int, Callable[..., Any]], found: Container[int]) -> None:
    """Run the model on `LENGTH` tokens, with each observer in front of its layer's forward; all are taken away again.

    Args:
        decoder: of the model.
        observers: by layer index; see `MethodOverride` for how they are called.
        found: where the observers note which layers they have seen.

    Raises:
        UnsupportedModelError: if the model did not run a layer that has an observer; or whatever an observer raises.
    """
    active = [MethodOverride(decoder.layers[index], "forward", observer) for index, observer in observers.items()]
    try:
        tokens = torch.arange(1, LENGTH + 1, device=input_device(decoder))[None] % decoder.config.vocab_size
        decoder.body(input_ids=tokens, use_cache=False, **_positions(decoder, tokens))
    finally:
        for override in active:
            override.remove()
    missing = [index for index in observers if index not in found]
    if missing:
        raise UnsupportedModelError(f"layer {missing[0]} was not run by {type(decoder.body).__name__}")


def input_device(decoder: Decoder) -> torch.device:
    """Where the model wants its tokens, also when accelerate keeps its weights elsewhere."""
    embedding: Any = decoder.model.get_input_embeddings()  # type: ignore[operator]
    return execution_device(embedding) or embedding.weight.device


def _positions(decoder: Decoder, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Positions that differ in time, height and width, where the model has them (M-RoPE): equal ones hide errors."""
    rope = getattr(decoder.config, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return {}
    time = torch.arange(LENGTH, device=tokens.device)
    return {"position_ids": torch.stack((time, time % 3, time // 2))[:, None]}
