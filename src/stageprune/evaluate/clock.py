"""Timing one `generate()` call: when each of its tokens was known."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList


@dataclass(frozen=True)
class TimedAnswer:
    """What one `generate()` call gave, and when.

    Attributes:
        tokens: the new tokens, `[batch, new_tokens]`.
        seconds: when each new token was known, counted from the call.
    """

    tokens: torch.Tensor
    seconds: tuple[float, ...]

    @property
    def first_token_s(self) -> float:
        """Time to the first token (TTFT), in seconds."""
        return self.seconds[0]

    @property
    def total_s(self) -> float:
        """Time of the whole answer, in seconds."""
        return self.seconds[-1]

    @property
    def token_s(self) -> float | None:
        """Time of each token after the first (TPOT), in seconds: their median; None if there was only one token."""
        steps = [after - before for before, after in pairwise(self.seconds)]
        return statistics.median(steps) if steps else None

    @property
    def tokens_per_s(self) -> float | None:
        """Generated tokens per second after the first, of all rows of the batch together."""
        return None if self.token_s is None else self.tokens.shape[0] / self.token_s


class TokenClock(StoppingCriteria):
    """Notes the time at which each token of a `generate()` call is known; it never stops the call.

    `generate()` asks its stopping criteria right after it chose a token, so the time includes what a user waits for:
    the forward pass, the choice and the overhead of `generate()` itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        synchronize(device)
        self._start = time.perf_counter()
        self.seconds: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Note the time; answers "go on" for each row of `input_ids`, `[batch, length]`."""
        synchronize(self._device)
        self.seconds.append(time.perf_counter() - self._start)
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def timed_generate(
    model: Any, input_ids: torch.Tensor, max_new_tokens: int, *, stop_early: bool = True, **kwargs: Any
) -> TimedAnswer:
    """`model.generate()` with a clock; greedy unless `kwargs` say otherwise.

    Args:
        model: a causal language model of transformers.
        input_ids: the prompt, `[batch, length]`, not padded.
        max_new_tokens: how many tokens to generate at most.
        stop_early: whether an end-of-sequence token ends the answer; without, it has `max_new_tokens` tokens, so
            that the times of several calls can be compared.
        kwargs: further arguments of `generate()`.
    """
    if not stop_early:
        kwargs["min_new_tokens"] = max_new_tokens
    arguments = {"attention_mask": torch.ones_like(input_ids), "do_sample": False, **kwargs}
    clock = TokenClock(input_ids.device)
    output = model.generate(
        input_ids, max_new_tokens=max_new_tokens, stopping_criteria=StoppingCriteriaList([clock]), **arguments
    )
    return TimedAnswer(output[:, input_ids.shape[1] :], tuple(clock.seconds))


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was asked of it; all devices of its kind, as a model may be spread."""
    if device.type == "cuda":
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
    elif device.type == "mps":
        torch.mps.synchronize()
