"""What fitted K/V projections win back, and on which text: `python benchmarks/fitted.py`.

Closeness to the dense model on its own answers to held-out prose, chats and code, with and without fitted projections;
fits on one kind of text are measured on the others, too. Writes docs/results/fitted.json; then
`python benchmarks/tables.py` puts the tables into docs/calibrate.md. Finished settings are kept in fitted.json.partial,
so that an interrupted run goes on. About 15 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import standard_error, write_json
from rich.progress import Progress

import stageprune as sp
from stageprune.evaluate.calibration import Reading, solve
from stageprune.evaluate.quality import Case, closeness, dense_cases
from stageprune.evaluate.samples import load_prompts
from stageprune.evaluate.text import prompt_of
from stageprune.models import load
from stageprune.prefill.layers import skipped_layers
from stageprune.prefill.projections import KVProjections, identity

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("prose", "chat", "code")
QUESTION = "Summarise the text above in a few sentences."
MEASURED = ("heapq.py", "textwrap.py", "statistics.py", "fractions.py", "shelve.py", "sched.py")
"""Modules of Python that no code fit reads."""
RIDGE = 1e-3


def settings() -> dict[str, dict[str, Any]]:
    """Name of each point: which share is skipped, and what the projections are fitted on (None: not fitted)."""
    found: dict[str, dict[str, Any]] = {}
    for name, ratio in (("1/3", 1 / 3), ("1/2", 1 / 2)):
        found[f"{name}, own weights"] = dict(ratio=ratio, text=None)
        found[f"{name}, fitted"] = dict(ratio=ratio, text="default", attention=True)
        found[f"{name}, fitted, all tokens equal"] = dict(ratio=ratio, text="default", attention=False)
    for kind in KINDS:
        found[f"1/3, fitted on {kind}"] = dict(ratio=1 / 3, text=kind, attention=True)
    return found


def code(tokenizer: Any, measured: bool, length: int, count: int) -> list[list[int]]:
    """Pieces of Python's own modules, all different: of those to measure on, or of others."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = (
        MEASURED if measured else sorted(path.name for path in library.glob("[a-z]*.py") if path.name not in MEASURED)
    )
    text = "\n\n".join((library / name).read_text(encoding="utf-8") for name in names[:60])
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    step = len(tokens) // count
    return [tokens[start : start + length] for start in range(0, step * count, step)]


def prompts_to_measure(tokenizer: Any, kind: str, count: int, length: int) -> list[list[int]]:
    """Held-out prompts of one kind."""
    if kind == "code":
        return code(tokenizer, True, length, count)
    question = QUESTION if kind == "chat" else None
    return [prompt_of(tokenizer, length, question, start=index * 401) for index in range(count)]


def prompts_to_fit(tokenizer: Any, kind: str, count: int, length: int) -> Sequence[Sequence[int]]:
    """Of one kind of text, or what `stageprune calibrate` reads by default: prose and chats."""
    if kind == "code":
        return code(tokenizer, False, length, count)
    if kind == "prose":
        return load_prompts(tokenizer, None, count, length, 0).tokens
    both = load_prompts(tokenizer, None, count if kind == "default" else 2 * count, length, 0, questions=True).tokens
    return both if kind == "default" else both[1::2]


def quality(
    model: Any, tokenizer: Any, one: dict[str, Any], cases: dict[str, list[Case]], options: argparse.Namespace
) -> dict[str, Any]:
    """Closeness on each kind of prompts."""
    layers = skipped_layers(sp.PrefillOnlyPruning(ratio=one["ratio"]), len(model.model.layers))
    method = sp.PrefillOnlyPruning(layers=layers)
    with tempfile.TemporaryDirectory() as scratch:
        if one["text"] is not None:
            reading = Reading(model, layers, one["attention"])
            reading.read(prompts_to_fit(tokenizer, one["text"], options.samples, options.fit_length))
            corrections = {layer.layer: layer.correction for layer in solve(reading, RIDGE, None)}
            folder = Path(scratch) / "fit"
            record = {"model": identity(reading.decoder, reading.own), "settings": {}, "measured": []}
            KVProjections(corrections, record).save(folder)
            method = sp.PrefillOnlyPruning(layers=layers, projections=str(folder))
        with sp.prune(model, method) as handle:
            extra = handle.report().extra_weight_bytes
            kinds = {kind: closeness(handle, some).to_dict() for kind, some in cases.items()}
    return {"extra_weight_bytes": extra, "kinds": kinds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=17, help="of each kind, to measure on")
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--samples", type=int, default=80, help="to fit on")
    parser.add_argument("--fit-length", type=int, default=384)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "fitted.json")
    options = parser.parse_args()
    names = ("prompts", "prompt_length", "new_tokens", "samples", "fit_length")
    run = {name: getattr(options, name) for name in names} | {"dtype": "bfloat16", "torch": torch.__version__}
    partial = options.out.with_suffix(".json.partial")
    data: dict[str, Any] = {"run": run, "points": {}}
    if partial.exists() and json.loads(partial.read_text())["run"] == run:
        data = json.loads(partial.read_text())
    missing = {name: one for name, one in settings().items() if name not in data["points"]}
    if missing:
        model, tokenizer = load("demo", dtype="bfloat16")
        with Progress() as progress:
            task = progress.add_task("dense answers", total=len(KINDS) * options.prompts)
            cases = {
                kind: dense_cases(
                    model,
                    prompts_to_measure(tokenizer, kind, options.prompts, options.prompt_length),
                    options.new_tokens,
                    lambda: progress.advance(task),
                )
                for kind in KINDS
            }
            task = progress.add_task("settings", total=len(missing))
            for name, one in missing.items():
                data["points"][name] = {"settings": one, **quality(model, tokenizer, one, cases, options)}
                write_json(partial, data)
                progress.advance(task)
    data["points"] = {name: data["points"][name] for name in settings()}
    write_json(options.out, data)
    partial.unlink(missing_ok=True)
    print(table(data), kinds_table(data), sep="\n\n")


def overall(point: dict[str, Any]) -> tuple[float, float, float]:
    """KL, its standard error over prompts, and agreement, over all kinds: they have equal shares."""
    kinds = point["kinds"].values()
    each = [kl for kind in kinds for kl in kind["kl_per_prompt"]]
    mean = sum(each) / len(each)
    return mean, standard_error(each), sum(kind["agreement"] for kind in kinds) / len(kinds)


def table(data: dict[str, Any]) -> str:
    """What a fit wins back."""
    run = data["run"]
    count = run["prompts"] * len(KINDS)
    lines = [
        f"SmolLM2-135M-Instruct ({run['dtype']}), {count} held-out prompts of {run['prompt_length']} tokens (prose,",
        f"chats and code, a third each), {count * run['new_tokens']:,} tokens of the dense model's own greedy answers;",
        f"fitted on {run['samples']} prompts of {run['fit_length']} tokens, a tenth of them kept out. KL in nats per",
        "token with its 95 % confidence interval over prompts. Reproduce with `python benchmarks/fitted.py`.",
        "",
        "| skipped, projections | KL | of own weights' | same prediction | extra memory |",
        "|---|---|---|---|---|",
    ]
    for name, point in data["points"].items():
        if point["settings"]["text"] not in (None, "default"):
            continue
        kl, error, agreement = overall(point)
        own = overall(data["points"][f"{name.split(',')[0]}, own weights"])[0]
        lines.append(
            f"| {name} | {kl:.3f} ({kl - 1.96 * error:.3f}-{kl + 1.96 * error:.3f}) | {kl / own:.2f} "
            f"| {agreement:.1%} | {point['extra_weight_bytes'] / 1e6:.1f} MB |"
        )
    return "\n".join(lines)


def kinds_table(data: dict[str, Any]) -> str:
    """Which text a fit is good for."""
    lines = [
        "KL ± its standard error on each kind of held-out prompts; a third of the layers skipped unless said",
        "otherwise.",
        "",
        f"| projections | {' | '.join(KINDS)} |",
        "|---|---|---|---|",
    ]
    for name, point in data["points"].items():
        cells = [
            f"{point['kinds'][kind]['kl']:.3f} ± {standard_error(point['kinds'][kind]['kl_per_prompt']):.3f}"
            for kind in KINDS
        ]
        lines.append(f"| {name.removeprefix('1/3, ')} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
