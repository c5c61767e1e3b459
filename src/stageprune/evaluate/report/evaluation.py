"""Files of `stageprune eval --output`: every setting and baseline of one run, with confidence intervals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Part, Point, Stage, made
from stageprune.evaluate.report.document import Section, Table
from stageprune.records import read_record

KIND, VERSION = "stageprune-eval", 1

_ANSWERS = {"answers": "the dense model's own greedy answers", "references": "given answers"}


def part(path: Path) -> Part:
    """What the file contributes.

    Raises:
        ResultFileError: if it is damaged.
        KeyError, TypeError, ValueError: if something is missing or wrong.
    """
    data = read_record(path, KIND, VERSION)
    settings, rows = data["settings"], data["rows"]
    how = made({"model": data["model"]}, settings)
    text = f"{settings['count']} prompts of {settings['data']}"
    tables = [
        _table(rows, kind, f"{how.model}: {text}; {shown}.")
        for kind, shown in _ANSWERS.items()
        if rows[0]["summary"]["all"][kind]
    ]
    points = [point for row in rows for point in _points(row, text)]
    return Part(path.name, how, [Section(f"Settings and baselines ({path.name})", tables)], points)


def _table(rows: Sequence[Any], kind: str, what: str) -> Table:
    """All buckets together, with the ideal speed-ups for the longest."""
    columns = ["setting", "KL (nats per token)", "same prediction", "perplexity", "equal tokens"]
    body = []
    for row in rows:
        metrics, ideal = row["summary"]["all"][kind], _longest(row)[1]
        matched = metrics.get("matched_share")
        body.append(
            [
                str(row["setting"]["name"]),
                _nats(_interval(metrics["kl"])),
                _share(_interval(metrics["agreement"])),
                f"{_interval(metrics['perplexity']).value:.3g}",
                "–" if matched is None else _share(_interval(matched)),
                "–" if ideal is None else show.factor(ideal["prefill"]),
                "–" if ideal is None else show.factor(ideal["decode"]),
            ]
        )
    caption = (
        f"{what} In brackets, confidence intervals. Equal tokens: share of a greedy answer before it parts from the "
        "dense model's. Ideal speed-ups by counting: operations up to the first token, bytes after it."
    )
    return Table([*columns, "ideal, prompt", "ideal, generation"], body, caption)


def _points(row: Any, text: str) -> list[Point]:
    bucket, ideal = _longest(row)
    name, methods = str(row["setting"]["name"]), row["setting"]["methods"]
    metrics = row["summary"][str(bucket)]["answers"] if ideal is not None else None
    if ideal is None or not methods or not metrics:
        return []
    series = " + ".join(str(method["method"]) for method in methods)
    kl, agreement = _interval(metrics["kl"]), _interval(metrics["agreement"])
    stages: tuple[tuple[Stage, str, str], ...] = (
        ("prompt", "prefill", "ideal speed-up of the prompt"),
        ("generation", "decode", "ideal speed-up of generation"),
    )
    where = f"{text}, up to {bucket:,} tokens"
    return [
        Point(name, series, stage, Interval.of(ideal[key]), measure, kl, agreement, where)
        for stage, key, measure in stages
        if Interval.of(ideal[key]).value != 1
    ]


def _longest(row: Any) -> tuple[int, Any]:
    """The bucket of the longest prompts, and its ideal speed-ups; None if there are none."""
    bucket = max(map(int, row["ideal"]), default=0)
    return bucket, row["ideal"].get(str(bucket))


def _interval(estimate: Any) -> Interval:
    return Interval.of(estimate["value"], estimate["lower"], estimate["upper"])


def _nats(interval: Interval) -> str:
    ends = f" [{interval.lower:.3g}, {interval.upper:.3g}]" if interval.lower < interval.upper else ""
    return f"{interval.value:.3g}{ends}"


def _share(interval: Interval) -> str:
    ends = f" [{interval.lower:.1%}, {interval.upper:.1%}]" if interval.lower < interval.upper else ""
    return f"{interval.value:.1%}{ends}"
