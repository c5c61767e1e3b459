"""Numbers as the tables show them."""

from __future__ import annotations

from collections.abc import Sequence

from stageprune.evaluate.report.content import Interval


def factor(value: float) -> str:
    """A speed-up."""
    return f"{value:.2f}×"


def middle_half(interval: Interval) -> str:
    """Where the middle half of some speed-ups lies."""
    return f"{interval.lower:.2f}–{interval.upper:.2f}"


def nats(interval: Interval | None) -> str:
    """A divergence and its error."""
    if interval is None:
        return "–"
    return f"{interval.value:.3g}" + (f" ± {interval.error:.2g}" if interval.error else "")


def share(interval: Interval | None) -> str:
    """A share and its error."""
    if interval is None:
        return "–"
    return f"{interval.value:.1%}" + (f" ± {interval.error:.1%}" if interval.error else "")


def time(seconds: float) -> str:
    """A duration with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def megabytes(value: float | None) -> str:
    """A size of memory in MB (10^6 bytes)."""
    return "–" if value is None else f"{value / 1e6:,.1f} MB"


def layers(indices: Sequence[int]) -> str:
    """Layer indices with runs as ranges, such as `3, 20–29`."""
    runs: list[list[int]] = []
    for index in sorted(indices):
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs) or "none"
