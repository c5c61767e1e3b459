"""Files of the quality benchmarks: settings and how close each stays to the dense model.

They are those of the repository: `ablation.json` (arXiv 2602.03295, Table 3), `channels.json` (the rules of channel
pruning, arXiv 2602.06822) and `fitted.json` (fitted keys and values).
"""

from __future__ import annotations

from typing import Any

from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Part, Point, made, number
from stageprune.evaluate.report.document import Section, Table

_MEASURE = "ideal speed-up of FFNs"
_COLUMNS = ("KL (nats per token)", "same prediction")


def ablation(name: str, data: Any) -> Part:
    """The parts of prefill-only pruning, one taken out at a time.

    Raises:
        KeyError, TypeError, ValueError: if something is missing or wrong.
    """
    settings = data["settings"]
    rows = [[variant, *_quality(row)] for variant, row in data["variants"].items()]
    caption = (
        f"{settings['model']}: what the prompt skips (as Table 3, in kind), {settings['prompts']} prompts of "
        f"{settings['prompt_length']} tokens. ± is the standard error over prompts."
    )
    table = Table(["variant", *_COLUMNS], rows, caption)
    return Part(
        name,
        made({}, {"command": "python benchmarks/ablation.py", **settings}),
        [Section(f"Ablations ({name})", [table])],
    )


def channels(name: str, data: Any) -> Part:
    """Every rule of channel pruning at its number of bytes."""
    run = data["run"]
    text = f"{run['prompts']} prompts of {run['prompt_length']} tokens"
    points, rows = [], []
    for rule, row in sorted(data["points"].items(), key=lambda item: (number(item[1]["bytes"]), item[0])):
        share = number(row["bytes"])
        kl, agreement = (Interval.of_mean(row[f"{what}_per_prompt"]) for what in ("kl", "agreement"))
        points.append(
            Point(rule, _series(row["settings"]), "generation", Interval.of(1 / share), _MEASURE, kl, agreement, text)
        )
        rows.append([rule, f"{share:.1%}", show.factor(1 / share), show.nats(kl), show.share(agreement)])
    caption = (
        f"{run['model']}: what a generated token computes (as paper 2's tables of ratios, γ and strategies), {text}. "
        "Bytes: share of the FFN weights that it reads. ± is the standard error over prompts."
    )
    columns = ["rule", "bytes", _MEASURE, *_COLUMNS]
    how = made({}, {"command": "python benchmarks/channels.py", **run})
    return Part(name, how, [Section(f"Channel ratios and selection ({name})", [Table(columns, rows, caption)])], points)


def fitted(name: str, data: Any) -> Part:
    """Skipped layers with their own and with fitted projections, on several kinds of text."""
    run = data["run"]
    rows = [
        [setting, kind, *_quality(row)]
        for setting, point in data["points"].items()
        for kind, row in point["kinds"].items()
    ]
    caption = (
        f"Keys and values of skipped layers from their own weights, and fitted; {run['prompts']} prompts of "
        f"{run['prompt_length']} tokens of each kind. ± is the standard error over prompts."
    )
    table = Table(["setting", "text", *_COLUMNS], rows, caption, text_columns=2)
    how = made({}, {"command": "python benchmarks/fitted.py", **run})
    return Part(name, how, [Section(f"Fitted keys and values ({name})", [table])])


def _quality(row: Any) -> list[str]:
    return [
        show.nats(Interval.of_mean(row["kl_per_prompt"])),
        show.share(Interval.of_mean(row["agreement_per_prompt"])),
    ]


def _series(settings: Any) -> str:
    return f"channels, {settings.get('selection', 'partition')}"
