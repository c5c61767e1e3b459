"""How much of the dense model's answer survives pruning, in tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch

from stageprune.evaluate.quality import answer_logits
from stageprune.pruning import Handle


def equal_share(answer: Sequence[int], other: Sequence[int]) -> float:
    """The share of positions at which two answers have the same token; 1 for two empty ones.

    Answers that part go different ways, so this falls quickly after the first difference.
    """
    length = max(len(answer), len(other))
    return sum(a == b for a, b in zip(answer, other, strict=False)) / length if length else 1.0


def first_difference(answer: Sequence[int], other: Sequence[int]) -> int | None:
    """The zero-based position of the first token that differs, or is missing in one; None if the answers are equal."""
    pairs = enumerate(zip_longest(answer, other))
    return next((position for position, (a, b) in pairs if a != b), None)


def teacher_forced_agreement(handle: Handle, input_ids: torch.Tensor, answer: torch.Tensor) -> float:
    """The share of the dense model's tokens that the pruned model would choose, too, after the same tokens before.

    Unlike `equal_share` it does not count one difference many times.

    Args:
        handle: of the pruned model.
        input_ids: the prompt, `[1, N]`.
        answer: of the dense model, decoded greedily, `[1, n]` with n >= 1.
    """
    return float((answer_logits(handle, input_ids, answer).argmax(-1) == answer).double().mean())
