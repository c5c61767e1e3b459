"""Which positions of a forward pass are real tokens, and which are padding."""

from __future__ import annotations

from typing import Any

import torch

from stageprune.errors import StageError
from stageprune.stages import Stage


def real_tokens(stage: Stage) -> torch.Tensor | None:
    """False at padding, for the new positions of the pass, `[batch, length]`; None if there is no padding.

    Raises:
        StageError: if the model was given a mask from which this cannot be told.
    """
    if "real" not in stage.carry:
        real = _read(stage.call.get("attention_mask"), stage)
        stage.carry["real"] = None if real is None or bool(real.all()) else real
    result: torch.Tensor | None = stage.carry["real"]
    return result


def batch_of(stage: Stage) -> int:
    """How many sequences the pass has."""
    tokens = stage.call.get("input_ids")
    return len(stage.call["inputs_embeds"] if tokens is None else tokens)


def _read(mask: Any, stage: Stage) -> torch.Tensor | None:
    batch = batch_of(stage)
    padding = stage.padding
    if padding is not None and padding.ndim == 2 and padding.shape[1] >= stage.past + stage.length:
        real = padding[:, stage.past : stage.past + stage.length].bool()
        return real.repeat_interleave(batch // len(real), dim=0)  # beams and return sequences
    if isinstance(mask, dict):  # one mask for each kind of layer, as generate() prepares for static caches
        mask = mask.get("full_attention", next(iter(mask.values())))
    if mask is None:
        return None
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return mask[:, -stage.length :].bool()
    if isinstance(mask, torch.Tensor) and mask.ndim == 4 and stage.past + stage.length <= mask.shape[-1]:
        return _own_columns(mask, stage)
    if batch == 1:
        return None  # nobody pads a single prompt
    raise StageError("cannot tell padding from this attention mask; pass generate() a 2-D attention_mask")


def _own_columns(mask: torch.Tensor, stage: Stage) -> torch.Tensor:
    """A real token attends to itself, padding is hidden from everybody."""
    own = mask[:, 0, :, stage.past : stage.past + stage.length].diagonal(dim1=-2, dim2=-1)
    return own if own.dtype == torch.bool else own > torch.finfo(own.dtype).min / 2
