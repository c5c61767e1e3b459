"""What pruning costs a mixture of experts and a vision-language model: `python benchmarks/trained.py`.

No pretrained ones can be had without a model hub, so two small ones are trained first, from scratch, on tasks that can
be checked (`list_tasks.py`, `shapes.py`). Then every setting answers the same test prompts, one at a time. Measured:
the share of answers that are right from the first to the last token, and the KL divergence from the dense model along
the right answer. Writes docs/results/trained.json; then `python benchmarks/tables.py` puts the tables into
docs/trained.md. Weights and finished settings are kept in benchmarks/.trained, so that an interrupted run goes on.
About half an hour on two cores, most of it training.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import standard_error, write_json
from rich.progress import Progress
from trained_models import RECIPES, TEST_SEED, Recipe, trained

import stageprune as sp
from stageprune.methods.base import Method
from stageprune.records import digest

ROOT = Path(__file__).resolve().parent.parent
SELECTIONS = ("partition", "fixed", "full", "gate", "cascade")
PREFILL = {"20 %": 0.2, "25 %": 0.25, "33 %": 1 / 3, "50 %": 0.5}
CHANNELS = {"20 %": 0.2, "40 %": 0.4}


def settings(experts: bool) -> dict[str, tuple[Method, ...]]:
    """Name of each row, and its methods."""
    found: dict[str, tuple[Method, ...]] = {"dense": ()}
    for name, ratio in PREFILL.items():
        found[f"prefill-only {name}"] = (sp.PrefillOnlyPruning(ratio),)
    for name, ratio in CHANNELS.items():
        for selection in SELECTIONS:
            found[f"channels {name}, {selection}"] = (_channels(ratio, selection=selection),)
    for name, ratio in CHANNELS.items():
        found[f"prefill-only 33 % and channels {name}"] = (sp.PrefillOnlyPruning(1 / 3), _channels(ratio))
    if experts:
        found |= {f"channels {name}": (_channels(ratio, **own),) for name, ratio, own in _expert_settings()}
    return found


def _channels(ratio: float, **own: Any) -> sp.OnlineChannelPruning:
    if own.get("selection") in ("full", "gate", "cascade"):
        own["pruned_share"] = 0.0  # these look at all channels of every token
    return sp.OnlineChannelPruning(ratio, backend="masked", **own)


def _expert_settings() -> list[tuple[str, float, dict[str, Any]]]:
    """The choices that only a mixture of experts has."""
    own: dict[str, dict[str, Any]] = {}
    for unseen in ("weights", "layer", "dense"):
        for below in (1, 3):
            own[f"unseen {unseen}, below {below}"] = dict(unseen=unseen, unseen_below=below)
    own["routing weights"] = dict(routing_weights=True)
    return [(f"{name}, {what}", ratio, one) for name, ratio in CHANNELS.items() for what, one in own.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", type=int, default=100, help="of each task")
    parser.add_argument("--models", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--weights", type=Path, default=Path(__file__).resolve().parent / ".trained")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "trained.json")
    options = parser.parse_args()
    options.weights.mkdir(parents=True, exist_ok=True)
    partial = options.weights / "results.json"
    data = json.loads(partial.read_text()) if partial.exists() else {}
    with Progress() as progress:
        for name in options.models:
            measure(name, options, data, lambda: write_json(partial, data), progress)
    write_json(options.out, {name: data[name] for name in RECIPES if name in data})


def measure(name: str, options: Any, data: dict[str, Any], save: Any, progress: Progress) -> None:
    """Train a model and measure every setting that `data` does not have yet."""
    recipe = RECIPES[name]
    task = progress.add_task(f"{name}: training", total=recipe.steps)
    model = trained(recipe, options.weights, lambda step, loss: progress.update(task, completed=step))
    progress.update(task, completed=recipe.steps)
    torch.manual_seed(TEST_SEED)
    examples = [one for kind in recipe.tasks.TASKS for one in recipe.examples(options.examples, TEST_SEED, kind)]
    run = {
        "architecture": type(model).__name__,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "steps": recipe.steps,
        "examples": options.examples,
        "torch": torch.__version__,
        "weights": digest({key: float(value.detach().double().sum()) for key, value in model.named_parameters()}),
    }
    if data.get(name, {}).get("run") != run:
        data[name] = {"run": run, "rows": {}}
    rows = data[name]["rows"]
    wanted = settings(experts=name == "moe")
    task = progress.add_task(f"{name}: settings", total=len(wanted))
    dense = [predictions(model, recipe, one, None) for one in examples]
    for title, methods in wanted.items():
        described = [method.to_dict() for method in methods]
        if rows.get(title, {}).get("methods") != described:
            rows[title] = {"methods": described, **row(model, recipe, examples, dense, methods)}
            save()
        progress.advance(task)
    data[name]["rows"] = {title: rows[title] for title in wanted}


def row(
    model: Any, recipe: Recipe, examples: Sequence[Any], dense: Sequence[torch.Tensor], methods: Sequence[Method]
) -> dict[str, Any]:
    """Right answers by task, and the divergence from the dense model, for each example."""
    right: dict[str, list[int]] = {}
    divergences = []
    handle = sp.prune(model, *methods) if methods else None
    for one, before in zip(examples, dense, strict=True):
        after = before if handle is None else predictions(model, recipe, one, handle)
        right.setdefault(one.task, []).append(int(after.argmax(-1).tolist() == list(one.answer)))
        divergences.append(float((before.exp() * (before - after)).sum(-1).mean()))
    report = None
    if handle is not None:
        report = handle.report(len(examples[0].prompt))
        handle.remove()
    return {"right": right, "kl": divergences, "ffn_bytes": _ffn_bytes(report)}


@torch.no_grad()
def predictions(model: Any, recipe: Recipe, one: Any, handle: sp.Handle | None) -> torch.Tensor:
    """Log-probabilities after each token before the right answer's, `[len(answer), vocab_size]`.

    Greedy decoding gives the right answer exactly where each of these has it as its likeliest token.
    """
    whole, _ = recipe.inputs([one])
    per_token = whole["input_ids"].shape
    inputs = {name: value[:, :-1] if value.shape == per_token else value for name, value in whole.items()}
    kept = dict(logits_to_keep=len(one.answer), use_cache=False)
    if handle is None:
        logits = model(**inputs, **kept).logits
    else:
        with handle.stage(prefill=len(one.prompt) - 1):
            logits = model(**inputs, **kept).logits
    return logits[0].double().log_softmax(-1)


def _ffn_bytes(report: sp.Report | None) -> float:
    """Share of the FFN weights that a generated token reads (of its experts')."""
    if report is None or not report.channels:
        return 1.0
    layer = report.channels[0]
    return round(layer.weights / layer.dense_weights, 4)


def table(data: dict[str, Any], name: str) -> str:
    """The rows of one model."""
    run, rows = data[name]["run"], data[name]["rows"]
    tasks = list(rows["dense"]["right"])
    lines = [
        f"{run['architecture']}, {run['parameters'] / 1e6:.1f} M parameters, {run['steps']:,} steps of training;",
        f"{run['examples']} test prompts of each task, one at a time. *Right*: answers without a wrong token, ± the",
        "standard error. *KL*: from the dense model, nats per token, ± its error. *FFN bytes*: share of the FFN",
        "weights (of its experts) that a generated token reads. Reproduce with `python benchmarks/trained.py`.",
        "",
        f"| setting | FFN bytes | KL | right | {' | '.join(tasks)} |",
        f"|---|---|---|---|{'---|' * len(tasks)}",
    ]
    for title, one in rows.items():
        answers = [value for task in tasks for value in one["right"][task]]
        by_task = " | ".join(f"{mean(one['right'][task]):.0%}" for task in tasks)
        lines.append(
            f"| {title} | {one['ffn_bytes']:.2f} | {mean(one['kl']):.3f} ± {standard_error(one['kl']):.3f} "
            f"| {mean(answers):.1%} ± {standard_error(answers):.1%} | {by_task} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
