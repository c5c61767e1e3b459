"""Which positions of a forward pass are real tokens, and which are padding."""

from __future__ import annotations

from typing import Any

import torch

from stageprune.errors import StageError
from stageprune.stages import CACHE_NAMES, Stage


def real_tokens(stage: Stage) -> torch.Tensor | None:
    """False at padding, for the new positions of the pass, `[batch, length]`; None if there is no padding.

    Raises:
        StageError: if the model was given a mask from which this cannot be told.
    """
    if "real" not in stage.carry:
        stage.carry["real"] = _read(stage.call.get("attention_mask"), stage)
    real: torch.Tensor | None = stage.carry["real"]
    return real


def _read(mask: Any, stage: Stage) -> torch.Tensor | None:
    if isinstance(mask, dict):  # one mask for each kind of layer, as generate() prepares for static caches
        mask = mask.get("full_attention", next(iter(mask.values())))
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        real = mask[:, -stage.length :].bool()
    elif isinstance(mask, torch.Tensor) and mask.ndim == 4:
        real = _own_columns(mask, stage)
    else:
        raise StageError(f"cannot tell padding from an attention mask of type {type(mask).__name__}; pass a 2-D mask")
    return None if bool(real.all()) else real


def _own_columns(mask: torch.Tensor, stage: Stage) -> torch.Tensor:
    """A real token attends to itself, padding is hidden from everybody."""
    cache = next((stage.call[name] for name in CACHE_NAMES if stage.call.get(name) is not None), None)
    past = 0 if cache is None else int(cache.get_seq_length())
    if past + stage.length > mask.shape[-1]:
        raise StageError("cannot tell padding from a sliding-window mask; use a dynamic cache with padded batches")
    own = mask[:, 0, :, past : past + stage.length].diagonal(dim1=-2, dim2=-1)
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
