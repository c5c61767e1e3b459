"""Dense and pruned side by side on one prompt: how fast, and what they answer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from stageprune.evaluate.agreement import equal_share, first_difference, teacher_forced_agreement
from stageprune.evaluate.clock import TimedAnswer, timed_generate
from stageprune.evaluate.speed import DecodeSpeed, PrefillSpeed, alternate, decode_speed, prefill_speed
from stageprune.pruning import Handle
from stageprune.report import Report

TIMED_TOKENS = 9
"""Generated in each timed turn: the first, and some more for the speed of generation."""


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt.

    Attributes:
        report: what is skipped, and the floating-point operations on this prompt.
        prefill: time to the first token.
        decode: the tokens after it, which the full model generates in both; None if there is one token only.
        dense: the dense model's answer, greedy.
        pruned: the pruned model's answer, greedy.
        agreement: the share of the dense answer's tokens that the pruned model would choose after the same tokens
            before.
    """

    report: Report
    prefill: PrefillSpeed
    decode: DecodeSpeed | None
    dense: TimedAnswer
    pruned: TimedAnswer
    agreement: float

    @property
    def equal_share(self) -> float:
        """The share of positions at which both answers have the same token."""
        return equal_share(self.dense.tokens[0].tolist(), self.pruned.tokens[0].tolist())

    @property
    def first_difference(self) -> int | None:
        """The zero-based position at which the answers part; None if they are equal."""
        return first_difference(self.dense.tokens[0].tolist(), self.pruned.tokens[0].tolist())

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "report": self.report.to_dict(),
            "prefill": self.prefill.to_dict(),
            "decode": self.decode and self.decode.to_dict(),
            "dense_tokens": self.dense.tokens[0].tolist(),
            "pruned_tokens": self.pruned.tokens[0].tolist(),
            "equal_share": self.equal_share,
            "first_difference": self.first_difference,
            "teacher_forced_agreement": self.agreement,
        }


def turns_of(pairs: int) -> int:
    """How often `compare` calls `on_turn`."""
    return 2 * pairs + 3


def compare(
    handle: Handle,
    input_ids: torch.Tensor,
    *,
    max_new_tokens: int = 64,
    pairs: int = 5,
    patience: float = math.inf,
    on_turn: Callable[[], object] = lambda: None,
) -> Comparison:
    """Answer one prompt dense and pruned, then measure the speed of both in alternation.

    Args:
        handle: of the pruned model.
        input_ids: the prompt, `[1, length]`.
        max_new_tokens: of each answer.
        pairs: of turns to time; the answers before them are the warm-up.
        patience: in seconds, for these turns; when it is used up, three pairs are enough.
        on_turn: called after each step, such as to advance a progress bar; see `turns_of`.
    """
    with handle.dense():
        dense = timed_generate(handle.model, input_ids, max_new_tokens)
    on_turn()
    pruned = timed_generate(handle.model, input_ids, max_new_tokens)
    on_turn()
    agreement = teacher_forced_agreement(handle, input_ids, dense.tokens)
    on_turn()
    timed_tokens = min(TIMED_TOKENS, max_new_tokens)
    turns = alternate(handle, input_ids, timed_tokens, pairs=pairs, patience=patience, on_turn=on_turn)
    length = input_ids.shape[1]
    prefill, decode = prefill_speed(handle, length, turns), decode_speed(handle, length, turns)
    return Comparison(handle.report(length), prefill, decode, dense, pruned, agreement)


def observed(handle: Handle, comparison: Comparison, input_ids: torch.Tensor) -> Comparison:
    """The comparison with a report that says how the pruned answer chose its channels; generates it once more."""
    with handle.observe():
        timed_generate(handle.model, input_ids, comparison.pruned.tokens.shape[1])
    return replace(comparison, report=handle.report(input_ids.shape[1]))
