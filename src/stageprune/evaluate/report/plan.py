"""Files of `stageprune plan --output`: the sweep of the ratio (arXiv 2602.03295, Table 4), and the frontier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from stageprune.evaluate.plan import Plan
from stageprune.evaluate.plan import Point as Candidate
from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Part, Point, PromptSpeed, made
from stageprune.evaluate.report.document import Section, Table

SWEEP = (0.2, 0.25, 1 / 3, 0.4, 0.5, 0.6)
"""The ratios of Table 4, besides 0."""

Speeds: TypeAlias = Sequence[PromptSpeed]


def part(path: Path) -> Part:
    """What the file contributes.

    Raises:
        ResultFileError: if it is damaged.
    """
    plan = Plan.load(path)
    how = made({"model": plan.model}, plan.settings)
    text = f"{plan.settings['count']} prompts of {plan.settings['data']}, {plan.settings['prompt_tokens']} tokens"
    points = [
        Point(
            f"layers {show.layers(candidate.layers)}",
            "prefill-only pruning",
            "prompt",
            Interval.of(plan.speedup(candidate)),
            "ideal speed-up of the prompt",
            _kl(candidate),
            _agreement(candidate),
            text,
        )
        for candidate in plan.points
    ]
    return Part(path.name, how, [Section(f"Frontier of the plan ({path.name})", [_frontier(plan, text)])], points)


def sweep(path: Path, speeds: Speeds) -> Section:
    """Table 4: the last layers skipped, and beside each ratio what other files measured of its speed-up."""
    plan = Plan.load(path)
    total = int(plan.model["num_hidden_layers"])
    last = {len(candidate.layers): candidate for candidate in plan.points if "last" in candidate.rules}
    found = _best_measured(speeds, str(plan.model["name"]))
    length = f", {found[0].prompt_length:,} tokens" if found else ""
    columns = ["ratio", "layers", "ideal speed-up", f"measured{length}", "KL (nats per token)", "same prediction"]
    rows = [["0 % (dense)", f"0 of {total}", show.factor(1), "–", "0", "100.0%"]]
    for ratio, count in _counts(total):
        candidate = last.get(count)
        if candidate is None:
            continue
        measured = [speed for speed in found if speed.skipped_layers == len(candidate.layers)]
        speedup = (
            f"{show.factor(measured[0].speedup.value)} ({show.middle_half(measured[0].speedup)})" if measured else "–"
        )
        rows.append(
            [
                f"{ratio:.0%}".replace("%", " %"),
                f"{len(candidate.layers)} of {total}",
                show.factor(plan.speedup(candidate)),
                speedup,
                show.nats(_kl(candidate)),
                show.share(_agreement(candidate)),
            ]
        )
    caption = (
        f"{plan.model['name']}: the last layers skipped (as Table 4), {plan.settings['count']} prompts of "
        f"{plan.settings['prompt_tokens']} tokens of {plan.settings['data']}. Ideal: by floating-point operations. "
        "± is the standard error over prompts; in brackets, the middle half of the measured speed-ups."
    )
    return Section(f"Sweep of the ratio ({path.name})", [Table(columns, rows, caption, text_columns=1)])


def _counts(total: int) -> list[tuple[float, int]]:
    """The ratios and their numbers of layers; of ratios that a small model rounds to the same number the nearest."""
    inexact = sorted(SWEEP, key=lambda ratio: -abs(ratio * total - round(ratio * total)))
    nearest = {round(ratio * total): ratio for ratio in inexact}
    return sorted((ratio, count) for count, ratio in nearest.items())


def _best_measured(speeds: Speeds, model: str) -> list[PromptSpeed]:
    """Of this model, at the longest prompt of the smallest batch."""
    ours = [speed for speed in speeds if speed.model == model]
    best = max(((-speed.batch, speed.prompt_length) for speed in ours), default=None)
    return [speed for speed in ours if (-speed.batch, speed.prompt_length) == best]


def _frontier(plan: Plan, text: str) -> Table:
    bounds = []
    if plan.bound.max_kl is not None:
        bounds.append(f"KL at most {plan.bound.max_kl:g}")
    if plan.bound.min_agreement is not None:
        bounds.append(f"agreement at least {plan.bound.min_agreement:.1%}")
    rows = [
        [
            f"{plan.ratio(candidate):.3g}",
            show.layers(candidate.layers),
            ", ".join(candidate.rules) or "–",
            show.factor(plan.speedup(candidate)),
            show.nats(_kl(candidate)),
            show.share(_agreement(candidate)),
        ]
        for candidate in plan.frontier
    ]
    marked = frozenset(index for index, candidate in enumerate(plan.frontier) if candidate == plan.best)
    caption = f"{text}. Marked: the largest speed-up within the bound ({' and '.join(bounds)})."
    columns = ["ratio", "skipped layers", "rule", "ideal speed-up", "KL (nats per token)", "same prediction"]
    return Table(columns, rows, caption, text_columns=3, marked=marked)


def _kl(candidate: Candidate) -> Interval:
    return Interval.with_error(candidate.kl, candidate.kl_error)


def _agreement(candidate: Candidate) -> Interval:
    return Interval.with_error(candidate.agreement, candidate.agreement_error)
