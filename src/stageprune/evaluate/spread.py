"""Medians and quartiles: what is reported of repeated measurements."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Spread:
    """The middle of some measurements, and the range of their middle half.

    Attributes:
        median: half of them lie below.
        lower: the first quartile.
        upper: the third quartile.
        count: how many there were.
    """

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Of one value or more."""
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, lower, upper, len(values))

    @property
    def is_wide(self) -> bool:
        """Whether the middle half spreads over more than a quarter of the median: something else was running."""
        return self.upper - self.lower > 0.25 * self.median

    def to_dict(self) -> dict[str, float]:
        """As JSON-ready data."""
        return asdict(self)
