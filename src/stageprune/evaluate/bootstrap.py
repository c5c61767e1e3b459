"""Confidence intervals: the percentile bootstrap over prompts (Efron and Tibshirani 1993, chapter 13).

Prompts are the units that were drawn; the tokens of one answer depend on each other. So whole prompts are drawn anew,
with replacement, and what is estimated is computed from each such sample. The draws depend on the seed and the number
of prompts alone: all settings and metrics are compared on the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch


@dataclass(frozen=True)
class Bootstrap:
    """How intervals are computed.

    Attributes:
        resamples: how often the prompts are drawn anew.
        confidence: share of these results that lies within the interval, above 0 and below 1.
        seed: any non-negative integer.
    """

    resamples: int = 1000
    confidence: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens or prompts, and where it lies.

    Attributes:
        value: of all prompts.
        lower, upper: ends of its confidence interval; None with one prompt, which says nothing about others.
    """

    value: float
    lower: float | None
    upper: float | None

    def to_dict(self) -> dict[str, float | None]:
        """As JSON-ready data."""
        return asdict(self)

    def map(self, function: Callable[[float], float]) -> Estimate:
        """The estimate of an increasing function of this one."""
        ends = (None if end is None else function(end) for end in (self.lower, self.upper))
        return Estimate(function(self.value), *ends)


def ratio(sums: Sequence[float], counts: Sequence[float], bootstrap: Bootstrap) -> Estimate:
    """The estimate of a mean over all tokens, `sum(sums) / sum(counts)`.

    Args:
        sums: over the tokens of each prompt's answer.
        counts: how many tokens each has, above 0.
        bootstrap: how the interval is computed.
    """
    value = math.fsum(sums) / math.fsum(counts)
    if len(sums) == 1:
        return Estimate(value, None, None)
    draws = _draws(len(sums), bootstrap.resamples, bootstrap.seed)
    numerators, denominators = (
        torch.tensor(values, dtype=torch.float64)[draws].sum(-1) for values in (list(sums), list(counts))
    )
    rest = (1 - bootstrap.confidence) / 2
    ends = torch.quantile(numerators / denominators, torch.tensor([rest, 1 - rest], dtype=torch.float64)).tolist()
    return Estimate(value, *ends)


@cache
def _draws(count: int, resamples: int, seed: int) -> Any:
    """Which prompts each resample holds, `[resamples, count]`."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(count, (resamples, count), generator=generator)
