"""Speed of a pruned model against its dense self.

Both are measured through the call that a user makes, `model.generate()`, on the same model object in the same process:
a dense turn runs inside `handle.dense()`. Turns alternate, and which goes first alternates, too, so that a machine
that slows down or is shared slows both; the speed-up is the median over pairs of neighbouring turns. The ideal
speed-up beside it is the ratio of the floating-point operations, attention included.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from stageprune.evaluate.alternation import alternate_turns
from stageprune.evaluate.clock import TimedAnswer, timed_generate
from stageprune.evaluate.memory import peak_bytes
from stageprune.evaluate.spread import Spread
from stageprune.pruning import Handle


@dataclass(frozen=True)
class PrefillSpeed:
    """Time to the first token: `generate(max_new_tokens=1)`, or the first token of a longer answer.

    Attributes:
        dense_s: of the dense model, in seconds.
        pruned_s: of the pruned model, in seconds.
        speedup: dense over pruned, per pair of turns.
        typical_s: the dense and the pruned time of the pair whose speed-up is the median.
        ideal_speedup: if time went by floating-point operations alone.
    """

    dense_s: Spread
    pruned_s: Spread
    speedup: Spread
    typical_s: tuple[float, float]
    ideal_speedup: float

    @property
    def achieved(self) -> float:
        """The share of the ideal speed-up that was measured."""
        return self.speedup.median / self.ideal_speedup

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "dense_s": self.dense_s.to_dict(),
            "pruned_s": self.pruned_s.to_dict(),
            "speedup": self.speedup.to_dict(),
            "typical_s": {"dense": self.typical_s[0], "pruned": self.typical_s[1]},
            "ideal_speedup": self.ideal_speedup,
            "achieved": self.achieved,
        }


@dataclass(frozen=True)
class DecodeSpeed:
    """Generation after the first token.

    Attributes:
        dense_tokens_per_s: of the dense model, all rows of the batch together.
        pruned_tokens_per_s: likewise, pruned.
        speedup: pruned over dense, per pair of turns.
        typical_tokens_per_s: the dense and the pruned speed of the pair whose speed-up is the median.
        ideal_speedup: of one sequence, if time went by reading weights and cached values alone.
        preparation_steps: what a prompt's partition and copies take, counted in dense decode steps; None where no
            channels are pruned.
        break_even_tokens: generated tokens after which the time won makes up for a later first token; 0 if the first
            token is not later, None if no time is won.
    """

    dense_tokens_per_s: Spread
    pruned_tokens_per_s: Spread
    speedup: Spread
    typical_tokens_per_s: tuple[float, float]
    ideal_speedup: float
    preparation_steps: float | None
    break_even_tokens: float | None

    @property
    def achieved(self) -> float:
        """The share of the ideal speed-up that was measured."""
        return self.speedup.median / self.ideal_speedup

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "dense_tokens_per_s": self.dense_tokens_per_s.to_dict(),
            "pruned_tokens_per_s": self.pruned_tokens_per_s.to_dict(),
            "speedup": self.speedup.to_dict(),
            "typical_tokens_per_s": {"dense": self.typical_tokens_per_s[0], "pruned": self.typical_tokens_per_s[1]},
            "ideal_speedup": self.ideal_speedup,
            "achieved": self.achieved,
            "preparation_steps": self.preparation_steps,
            "break_even_tokens": self.break_even_tokens,
        }


@dataclass(frozen=True)
class AnswerSpeed:
    """A whole `generate()` call, from the prompt to the last token.

    Attributes:
        new_tokens: of each row.
        dense_s: of the dense model, in seconds.
        pruned_s: of the pruned model, in seconds.
        speedup: dense over pruned, per pair of turns.
        tokens_per_s: generated tokens over the time of the whole call, of all rows together: dense and pruned, in the
            pair whose speed-up is the median.
        ideal_speedup: if both stages, weighted by the dense model's times, had their ideal speed-up.
    """

    new_tokens: int
    dense_s: Spread
    pruned_s: Spread
    speedup: Spread
    tokens_per_s: tuple[float, float]
    ideal_speedup: float

    @property
    def achieved(self) -> float:
        """The share of the ideal speed-up that was measured."""
        return self.speedup.median / self.ideal_speedup

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "new_tokens": self.new_tokens,
            "dense_s": self.dense_s.to_dict(),
            "pruned_s": self.pruned_s.to_dict(),
            "speedup": self.speedup.to_dict(),
            "tokens_per_s": {"dense": self.tokens_per_s[0], "pruned": self.tokens_per_s[1]},
            "ideal_speedup": self.ideal_speedup,
            "achieved": self.achieved,
        }


@dataclass(frozen=True)
class PrefillMemory:
    """Peak memory of `generate(max_new_tokens=1)` on top of the weights, in bytes; None where it is not known."""

    dense_bytes: int | None
    pruned_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"dense_bytes": self.dense_bytes, "pruned_bytes": self.pruned_bytes}


Pair = tuple[TimedAnswer, TimedAnswer]
"""A dense and a pruned turn, one right after the other."""


def alternate(
    handle: Handle,
    input_ids: torch.Tensor,
    new_tokens: int = 1,
    *,
    pairs: int = 5,
    seconds: float = 0.0,
    patience: float = math.inf,
    on_turn: Callable[[], object] = lambda: None,
) -> list[Pair]:
    """Dense and pruned turns in alternation, on the same prompt.

    Args:
        handle: of the pruned model.
        input_ids: the prompt, `[batch, length]`.
        new_tokens: generated in each turn.
        pairs, seconds, patience: how many; see `alternate_turns`.
        on_turn: called after each turn, such as to advance a progress bar.
    """

    def turn(dense: bool) -> TimedAnswer:
        answer = _turn(handle, input_ids, new_tokens, dense)
        on_turn()
        return answer

    return alternate_turns(turn, pairs=pairs, seconds=seconds, patience=patience)


def warm_up(handle: Handle, input_ids: torch.Tensor) -> None:
    """One turn of each kind, whose time does not count: first calls allocate, choose kernels and fill caches."""
    for dense in (True, False):
        _turn(handle, input_ids, 1, dense)


def prefill_speed(handle: Handle, prompt_length: int, pairs: list[Pair]) -> PrefillSpeed:
    """The time to the first token in `alternate()`'s results on prompts of `prompt_length` tokens."""
    dense = [turn.first_token_s for turn, _ in pairs]
    pruned = [turn.first_token_s for _, turn in pairs]
    ratios = [slow / fast for slow, fast in zip(dense, pruned, strict=True)]
    ideal = handle.report(prompt_length).ideal_speedup
    return PrefillSpeed(Spread.of(dense), Spread.of(pruned), Spread.of(ratios), _typical(dense, pruned, ratios), ideal)


def decode_speed(handle: Handle, prompt_length: int, pairs: list[Pair]) -> DecodeSpeed | None:
    """The speed after the first token in `alternate()`'s results on prompts of `prompt_length` tokens.

    None if a turn generated one token only.
    """
    dense = [turn.tokens_per_s for turn, _ in pairs if turn.tokens_per_s is not None]
    pruned = [turn.tokens_per_s for _, turn in pairs if turn.tokens_per_s is not None]
    if len(dense) < len(pairs) or len(pruned) < len(pairs):
        return None
    ratios = [fast / slow for slow, fast in zip(dense, pruned, strict=True)]
    generated = pairs[0][0].tokens.shape[1]
    report = handle.report(prompt_length + generated // 2)
    batch = pairs[0][0].tokens.shape[0]
    step = batch / statistics.median(dense)
    return DecodeSpeed(
        Spread.of(dense),
        Spread.of(pruned),
        Spread.of(ratios),
        _typical(dense, pruned, ratios),
        report.ideal_decode_speedup,
        None if report.preparation_s is None else report.preparation_s / step,
        _break_even(pairs),
    )


def answer_speed(handle: Handle, prompt_length: int, pairs: list[Pair]) -> AnswerSpeed:
    """The speed of whole answers in `alternate()`'s results on prompts of `prompt_length` tokens."""
    dense = [turn.total_s for turn, _ in pairs]
    pruned = [turn.total_s for _, turn in pairs]
    ratios = [slow / fast for slow, fast in zip(dense, pruned, strict=True)]
    batch, new_tokens = pairs[0][0].tokens.shape
    slow, fast = (batch * new_tokens / seconds for seconds in _typical(dense, pruned, ratios))
    first = statistics.median(turn.first_token_s / turn.total_s for turn, _ in pairs)
    ideals = (
        handle.report(prompt_length).ideal_speedup,
        handle.report(prompt_length + new_tokens // 2).ideal_decode_speedup,
    )
    ideal = 1 / (first / ideals[0] + (1 - first) / ideals[1])
    return AnswerSpeed(new_tokens, Spread.of(dense), Spread.of(pruned), Spread.of(ratios), (slow, fast), ideal)


def _break_even(pairs: list[Pair]) -> float | None:
    """From medians over pairs of turns: how much later the first token is, over what each further token wins."""
    later = statistics.median(pruned.first_token_s - dense.first_token_s for dense, pruned in pairs)
    won = statistics.median((dense.token_s or 0) - (pruned.token_s or 0) for dense, pruned in pairs)
    return None if won <= 0 else max(later, 0) / won


def _typical(dense: list[float], pruned: list[float], ratios: list[float]) -> tuple[float, float]:
    """The pair whose ratio is the median."""
    index = ratios.index(statistics.median_low(ratios))
    return dense[index], pruned[index]


def prefill_memory(handle: Handle, input_ids: torch.Tensor) -> PrefillMemory:
    """Peak memory of encoding the prompt `[batch, length]` and choosing the first token; see `peak_bytes`."""
    dense, pruned = (
        peak_bytes(lambda dense=dense: _turn(handle, input_ids, 1, dense), input_ids.device)  # type: ignore[misc]
        for dense in (True, False)
    )
    return PrefillMemory(dense, pruned)


def _turn(handle: Handle, input_ids: torch.Tensor, new_tokens: int, dense: bool) -> TimedAnswer:
    with handle.dense() if dense else nullcontext():
        return timed_generate(handle.model, input_ids, new_tokens, stop_early=False)
