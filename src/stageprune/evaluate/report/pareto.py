"""Quality against speed: which settings no other one beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Point
from stageprune.evaluate.report.document import Block, Section, Table
from stageprune.evaluate.report.figures import COLORS, MARKERS, Drawing, logarithmic

STAGES = {
    "prompt": "Quality against the speed of the prompt",
    "generation": "Quality against the speed of generation",
}

_LEAST = 1e-4
"""KL divergences below it are drawn there: a logarithmic axis has no place for 0."""


def frontier(points: Sequence[Point]) -> list[int]:
    """Indices of the points that no other one dominates: as fast and as close, and better in one of both."""
    return [
        index
        for index, point in enumerate(points)
        if not any(_dominates(other, point) for other in points if other is not point)
    ]


def sections(points: Sequence[Point], drawing: Drawing) -> list[Section]:
    """A section for each stage of which there are points, with a plot for each text that quality was measured on."""
    found = []
    for stage, title in STAGES.items():
        blocks: list[Block] = []
        ours = sorted((point for point in points if point.stage == stage), key=_group)
        for _, group in groupby(ours, _group):
            blocks += _blocks(list(group), drawing)
        if blocks:
            found.append(Section(title, blocks))
    return found


def _group(point: Point) -> tuple[Any, ...]:
    """Points that can be compared: of the same text and the same measure of speed."""
    return point.text, point.measure, point.kl is None


def _blocks(points: list[Point], drawing: Drawing) -> list[Block]:
    best = frontier(points)
    by_kl = points[0].kl is not None
    speed = points[0].measure
    what = "KL divergence from the dense model" if by_kl else "Share of tokens predicted as the dense model does"
    caption = (
        f"{what} against {speed}; the line joins the settings that no other one beats in both. {points[0].text}. "
        "Bars: how sure each value is."
    )
    rows = []
    for index in sorted(best, key=lambda index: points[index].speedup.value):
        point = points[index]
        rows.append(
            [
                point.label,
                point.series,
                show.factor(point.speedup.value),
                show.nats(point.kl),
                show.share(point.agreement),
            ]
        )
    columns = ["setting on the frontier", "method", speed, "KL (nats per token)", "same prediction"]
    figure = drawing(lambda axes: _draw(axes, points, best, speed, by_kl), caption)
    return [*figure, Table(columns, rows, f"The frontier, from slow to fast. {points[0].text}.", text_columns=2)]


def _loss(point: Point) -> float:
    if point.kl is not None:
        return point.kl.value
    return -point.agreement.value if point.agreement is not None else 0.0


def _dominates(one: Point, other: Point) -> bool:
    ours, theirs = ((-point.speedup.value, _loss(point)) for point in (one, other))
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _draw(axes: Any, points: list[Point], best: list[int], speed: str, by_kl: bool) -> None:
    for index, series in enumerate(dict.fromkeys(point.series for point in points)):
        ours = [point for point in points if point.series == series]
        style = {"color": COLORS[index % len(COLORS)], "marker": MARKERS[index % len(MARKERS)]}
        speeds = [point.speedup for point in ours]
        values = [_drawn(point, by_kl) for point in ours]
        axes.errorbar(
            [speed.value for speed in speeds], [value.value for value in values],
            xerr=_bars(speeds), yerr=_bars(values), linestyle="", markersize=4, elinewidth=0.8, label=series, **style,
        )  # fmt: skip
    line = sorted(best, key=lambda index: points[index].speedup.value)
    axes.plot(
        [points[index].speedup.value for index in line], [_drawn(points[index], by_kl).value for index in line],
        linestyle="--", linewidth=1, color=axes.yaxis.label.get_color(), label="frontier", zorder=1,
    )  # fmt: skip
    if by_kl:
        logarithmic(axes)
    axes.set(xlabel=f"{speed} (×)", ylabel="KL (nats per token)" if by_kl else "same prediction")
    axes.legend()


def _drawn(point: Point, by_kl: bool) -> Interval:
    value = point.kl if by_kl else point.agreement
    assert value is not None
    if not by_kl:
        return value
    return Interval(max(value.value, _LEAST), max(value.lower, _LEAST), max(value.upper, _LEAST))


def _bars(intervals: Sequence[Interval]) -> list[list[float]]:
    return [
        [max(interval.value - interval.lower, 0) for interval in intervals],
        [max(interval.upper - interval.value, 0) for interval in intervals],
    ]
