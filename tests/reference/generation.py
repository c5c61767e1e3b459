"""Greedy generation with prefill-only pruning, by running the oracle over the whole sequence for every token."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from reference.prefill_oracle import gated_logits


def greedy(
    model: Any,
    skipped: Collection[int],
    input_ids: torch.Tensor,
    new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    context: torch.Tensor | None = None,
    hide_context: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences `[batch, length + new_tokens]` and the logits that chose each token `[batch, new_tokens, vocabulary]`.

    Args:
        model: untouched.
        skipped: the layers that prefill skips.
        input_ids: the prompts, `[batch, length]`, padded on the left.
        new_tokens: how many tokens to generate.
        attention_mask: 0 at padding.
        context: which prompt positions are prefill, `[batch, length]`; by default all but the last.
        hide_context: see `gated_logits`.
    """

    def logits_of(closed: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return gated_logits(model, skipped, closed, hide_context, **inputs)

    return greedy_by(logits_of, input_ids, new_tokens, attention_mask, context)


def greedy_by(
    logits_of: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor],
    input_ids: torch.Tensor,
    new_tokens: int,
    attention_mask: torch.Tensor | None,
    context: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`greedy` for any oracle: `logits_of` maps the prefill positions and the inputs of a forward to its logits."""
    batch, length = input_ids.shape
    if context is None:
        context = (torch.arange(length) < length - 1)[None].expand(batch, length)
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    tokens, chosen = input_ids, []
    for _ in range(new_tokens):
        grown = tokens.shape[1] - length
        closed = torch.cat((context, torch.zeros(batch, grown, dtype=torch.bool)), dim=1)
        full_mask = torch.cat((mask, torch.ones(batch, grown, dtype=mask.dtype)), dim=1)
        position_ids = (full_mask.cumsum(-1) - 1).clamp(min=0)
        inputs = dict(input_ids=tokens, attention_mask=full_mask, position_ids=position_ids)
        logits = logits_of(closed, inputs)[:, -1]
        chosen.append(logits)
        tokens = torch.cat((tokens, logits.argmax(-1, keepdim=True)), dim=1)
    return tokens, torch.stack(chosen, dim=1)
