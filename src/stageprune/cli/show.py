"""Numbers as people read them."""

from __future__ import annotations

from stageprune.evaluate.spread import Spread

BUSY = (
    "The times vary a lot: this machine is busy with something else. The speed-up, taken between neighbouring turns, "
    "suffers less than the times, but measure again when it is idle."
)


def seconds(value: float) -> str:
    """A duration with three significant digits, in seconds or milliseconds."""
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def megabytes(value: int | None) -> str:
    """A memory size in MB (10^6 bytes)."""
    return "unknown" if value is None else f"{value / 1e6:,.1f} MB"


def factor(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}x"


def quartiles(spread: Spread) -> str:
    """The range of the middle half of some speed-ups."""
    return f"{spread.lower:.2f}-{spread.upper:.2f}"


def rate(value: float | None) -> str:
    """Tokens per second."""
    return "-" if value is None else f"{value:.3g} tokens/s"
