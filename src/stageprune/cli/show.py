"""Numbers as people read them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stageprune.cli import options
from stageprune.evaluate.spread import Spread

if TYPE_CHECKING:
    from stageprune.report import Report

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


def pruned(report: Report) -> str:
    """What is pruned, in a few words."""
    parts = []
    if report.skipped_layers or not report.channels:
        parts.append(f"skipped layers {options.shown(report.skipped_layers)} of {report.num_hidden_layers}")
    if report.channels:
        parts.append(pruned_channels(report))
    return "; ".join(parts)


def pruned_channels(report: Report) -> str:
    """What generated tokens do not read."""
    return (
        f"reads {1 / report.ideal_ffn_speedup:.0%} of the weights of {len(report.channels)} of "
        f"{report.num_hidden_layers} FFNs ({', '.join(report.backends)})"
    )
