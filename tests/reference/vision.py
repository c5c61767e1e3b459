"""The oracles for vision-language models: a forward without a cache that sees the images and all tokens anew.

Every step encodes the images again, writes their features over the placeholders, lets the model find the positions of
the whole sequence (in three dimensions where it has them) and its masks, and gates the layers of the language model.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from reference.channel_oracle import channel_logits
from reference.generation import greedy_by
from reference.prefill_oracle import gated_logits

_BY_TOKEN = ("mm_token_type_ids", "token_type_ids")
_GRIDS = ("image_grid_thw", "video_grid_thw")


def whole(inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> dict[str, Any]:
    """The inputs of a forward over prompts and what follows them.

    Args:
        inputs: of the prompts, as the processor gives them.
        tokens: the sequences, `[batch, length]`: the prompts and text after them.
    """
    prompt = inputs["input_ids"]
    assert torch.equal(tokens[:, : prompt.shape[1]], prompt)
    new = tokens.shape[1] - prompt.shape[1]
    mask = torch.cat((inputs["attention_mask"], torch.ones(len(tokens), new, dtype=torch.long)), dim=1)
    result = dict(inputs) | dict(input_ids=tokens, attention_mask=mask)
    for name in _BY_TOKEN:
        if name in inputs:
            result[name] = torch.cat((inputs[name], inputs[name].new_zeros(len(tokens), new)), dim=1)
    if not any(name in inputs for name in _GRIDS):
        result["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return result


def logits_of(
    model: Any,
    inputs: dict[str, torch.Tensor],
    tokens: torch.Tensor,
    skipped: Collection[int] = (),
    channels: Any = None,
) -> torch.Tensor:
    """Logits `[batch, length, vocabulary]` of the sequences, whose prompt but its last token is prefill.

    Args:
        model: untouched.
        inputs: of the prompts.
        tokens: the sequences.
        skipped: layers that prefill skips.
        channels: the settings of an `OnlineChannelPruning`; None for none.
    """
    prefill = inputs["input_ids"].shape[1] - 1
    if channels is None:
        return gated_logits(model, skipped, prefill, **whole(inputs, tokens))
    return channel_logits(model, channels, prefill, skipped=skipped, **whole(inputs, tokens))


def greedy(
    model: Any,
    inputs: dict[str, torch.Tensor],
    new_tokens: int,
    skipped: Collection[int] = (),
    channels: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences and the logits that chose each token; see `logits_of`."""

    def of(closed: torch.Tensor, text: dict[str, torch.Tensor]) -> torch.Tensor:
        return logits_of(model, inputs, text["input_ids"], skipped, channels)

    return greedy_by(of, inputs["input_ids"], new_tokens, inputs["attention_mask"], None)
