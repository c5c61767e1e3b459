"""Files of `stageprune analyze --output`: importance of layers and drift (arXiv 2602.03295, Figures 1 and 2)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Part, made
from stageprune.evaluate.report.document import Block, Section, Table
from stageprune.evaluate.report.figures import COLORS, MARKERS, Drawing, logarithmic

DRIFTS = {
    "hidden_states": "hidden states",
    "keys": "keys",
    "values": "values",
    "attention": "attention output, decode",
}


def part(name: str, data: Any, drawing: Drawing) -> Part:
    """What the file `name` contributes; it may be a summary without the single samples.

    Raises:
        KeyError, TypeError, ValueError: if something is missing or wrong.
    """
    settings = data["settings"]
    scores = {stage: [_score(row[stage]) for row in data["layers"]] for stage in ("prefill", "decode")}
    drifts = {what: [(int(row["layer"]), _drift(row[what])) for row in data["drift"]] for what in DRIFTS}
    how = made(data, settings)
    what = f"{how.model}: {settings['samples']} prompts from {settings['data']}"
    blocks: list[Block] = []
    blocks += drawing(
        lambda axes: _draw_scores(axes, scores),
        f"{what}. Importance of each layer by stage, the mean squared gradient of its gate; bars are standard errors "
        "(as Figure 1). A layer whose importance is 0 has no place on a logarithmic axis.",
    )
    if data["drift"]:
        blocks += drawing(
            lambda axes: _draw_drift(axes, drifts),
            "Cosine similarity to the full model when the last layers are skipped in prefill (as Figure 2).",
        )
    blocks.append(_table(scores, drifts, what))
    return Part(name, how, [Section(f"Importance of layers ({name})", blocks)])


def _score(row: Any) -> Interval:
    return Interval.with_error(row["importance"], row["standard_error"])


def _drift(row: Any) -> Interval:
    return Interval.with_error(row["mean"], row["standard_error"])


def _table(scores: dict[str, list[Interval]], drifts: dict[str, list[tuple[int, Interval]]], what: str) -> Table:
    by_layer = {name: dict(values) for name, values in drifts.items()}
    shown = [name for name, values in by_layer.items() if values]
    columns = ["layer", "prefill", "decode", "decode / prefill", *(f"cos {DRIFTS[name]}" for name in shown)]
    rows = []
    for layer, (prefill, decode) in enumerate(zip(scores["prefill"], scores["decode"], strict=True)):
        ratio = f"{decode.value / prefill.value:.2f}" if prefill.value else "–"
        cosines = [f"{by_layer[name][layer].value:.3f}" if layer in by_layer[name] else "" for name in shown]
        rows.append([str(layer), show.nats(prefill), show.nats(decode), ratio, *cosines])
    return Table(columns, rows, f"{what}. ± is the standard error.", text_columns=0)


def _draw_scores(axes: Any, scores: dict[str, list[Interval]]) -> None:
    for index, (stage, values) in enumerate(scores.items()):
        _line(axes, [(layer, value) for layer, value in enumerate(values) if value.value > 0], stage, index)
    logarithmic(axes)
    axes.set(xlabel="layer", ylabel="importance")
    axes.legend()


def _draw_drift(axes: Any, drifts: dict[str, list[tuple[int, Interval]]]) -> None:
    for index, (what, values) in enumerate(drifts.items()):
        _line(axes, values, DRIFTS[what], index)
    axes.set(xlabel="layer", ylabel="cosine similarity")
    axes.legend()


def _line(axes: Any, points: Sequence[tuple[int, Interval]], label: str, index: int) -> None:
    values = [value.value for _, value in points]
    # A bar that reaches 0 would have no end on a logarithmic axis.
    lower = [min(value.error, 0.99 * abs(value.value)) for _, value in points]
    upper = [value.error for _, value in points]
    axes.errorbar(
        [x for x, _ in points], values, yerr=[lower, upper], label=label, color=COLORS[index], marker=MARKERS[index],
        markersize=3, linewidth=1.3, capsize=2,
    )  # fmt: skip
