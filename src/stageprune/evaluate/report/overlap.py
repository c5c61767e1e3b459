"""Files of `stageprune compare --json` with channels: how tokens' channels relate to the prompt's (arXiv 2602.06822).

The paper's Figure 2: what a generated token would choose for itself overlaps with what the prompt ranks highest.
"""

from __future__ import annotations

from typing import Any

from stageprune.evaluate.report.content import Part, made, number
from stageprune.evaluate.report.document import Block, Section, Table
from stageprune.evaluate.report.figures import COLORS, MARKERS, Drawing


def part(name: str, data: Any, drawing: Drawing) -> Part:
    """What the file `name` contributes.

    Raises:
        KeyError, TypeError, ValueError: if something is missing or wrong.
    """
    seen = [(int(row["layer"]), row["observed"]) for row in data["report"]["channels"] if row["observed"] is not None]
    if not seen:
        raise ValueError("it compares no pruned channels")
    by_layer = [(layer, _mean(row["overlap"]), row["turnover"]) for layer, row in seen]
    count = min(len(row["overlap"]) for _, row in seen)
    by_token = [_mean([row["overlap"][step] for _, row in seen]) for step in range(count)]
    moved = [_mean([row["rank_difference"][step] for _, row in seen]) for step in range(count)]
    how = made(data)
    blocks: list[Block] = drawing(
        lambda axes: _draw(axes, by_token, moved),
        f"{how.model}: share of each generated token's best half of the channels that is in the prompt's best half, "
        f"mean of {len(seen)} layers (as Figure 2), and how far a channel's rank moves.",
    )
    rows = [
        [str(layer), f"{overlap:.1%}", "–" if turnover is None else f"{number(turnover):.1%}"]
        for layer, overlap, turnover in by_layer
    ]
    caption = (
        f"Mean of {count} generated tokens. Turnover: share of a token's own choice of channels that the token before "
        "did not have."
    )
    blocks.append(Table(["layer", "overlap with the prompt's best half", "turnover"], rows, caption, text_columns=0))
    return Part(name, how, [Section(f"Overlap of channels ({name})", blocks)])


def _mean(values: Any) -> float:
    numbers = [number(value) for value in values]
    return sum(numbers) / len(numbers)


def _draw(axes: Any, overlap: list[float], moved: list[float]) -> None:
    lines = (("overlap of the best halves", overlap), ("distance of ranks / channels", moved))
    for index, (label, values) in enumerate(lines):
        axes.plot(
            range(1, len(values) + 1), values, color=COLORS[index], marker=MARKERS[index], markersize=3, label=label
        )
    axes.set(xlabel="generated token", ylabel="share", ylim=(0, 1))
    axes.legend()
