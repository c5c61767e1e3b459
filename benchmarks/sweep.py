"""Every method and every baseline on the same inputs in one run: `python benchmarks/sweep.py`, or `make sweep`.

The papers' ratios, ablations, partition fractions and selections, fitted K/V projections, what goes beyond the papers,
both methods together, and all baselines at comparable ratios. Quality against the dense model on its own greedy answers
with bootstrap intervals over prompts; speed of the first token and of generation in turns that alternate with dense
ones. Writes docs/results/sweep.json; then `python benchmarks/tables.py` puts the table into docs/sweep.md. What is done
is kept in benchmarks/.sweep, so that an interrupted run goes on. About half an hour on two idle cores.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from common import write_json
from rich.progress import Progress as Bar

import stageprune as sp
from stageprune import baselines
from stageprune.evaluate.bootstrap import Bootstrap
from stageprune.evaluate.evaluating import Progress, evaluate, steps_of
from stageprune.evaluate.evaluation import Evaluation
from stageprune.evaluate.examples import Example
from stageprune.evaluate.setting import Setting, with_calibration
from stageprune.evaluate.speed import alternate, decode_speed, prefill_speed, warm_up
from stageprune.evaluate.system import system_info
from stageprune.evaluate.text import held_out_prompts, prompt_of
from stageprune.files import write_file
from stageprune.methods.base import Method
from stageprune.models import load
from stageprune.records import digest

ROOT = Path(__file__).resolve().parent.parent
KEPT = Path(__file__).resolve().parent / ".sweep"
RATIOS = {"20 %": 0.2, "25 %": 0.25, "33 %": 1 / 3, "40 %": 0.4, "50 %": 0.5, "60 %": 0.6}
FITTED = {"33 %": "1/3", "50 %": "1/2"}
CHANNELS = {"20 %": 0.2, "40 %": 0.4}
THIRD = 1 / 3


def groups() -> dict[str, dict[str, tuple[Method, ...]]]:
    """The rows of the table, by heading and name."""
    prefill, channels = sp.PrefillOnlyPruning, sp.OnlineChannelPruning
    found: dict[str, dict[str, tuple[Method, ...]]] = {
        "Prefill-only pruning (paper 1, Table 4)": {name: (prefill(ratio),) for name, ratio in RATIOS.items()},
        "with fitted K/V projections (beyond the paper)": {name: (sp.load(str(folder(name))),) for name in FITTED},
        "Ablations at 33 % (paper 1, Table 3)": {
            "first layers": (prefill(THIRD, "first"),),
            "every third layer": (prefill(THIRD, "interleaved"),),
            "no K/V projection": (prefill(THIRD, kv_projection=False),),
            "no boundary rule": (prefill(THIRD, boundary=False),),
            "the same layers dropped in both stages": (baselines.LayerDropping(THIRD),),
        },
    }
    selections: dict[str, tuple[Method, ...]] = {}
    for name, ratio in CHANNELS.items():
        selections[f"{name}, partition, γ 0.1"] = (channels(ratio),)
        selections[f"{name}, partition, γ 0.05"] = (channels(ratio, partition_fraction=0.05),)
        selections[f"{name}, partition, γ 0.2"] = (channels(ratio, partition_fraction=0.2),)
        selections[f"{name}, fixed"] = (channels(ratio, selection="fixed"),)
        selections[f"{name}, full"] = (channels(ratio, selection="full", pruned_share=0.0),)
    found["Online channel pruning (paper 2)"] = selections
    found["Channel presets (beyond the paper)"] = {
        name: (channels.preset(name),) for name in ("careful", "balanced", "fast")
    }
    found["Both methods"] = {
        f"prefill-only 33 %, channels {name}": (prefill(THIRD), channels(ratio)) for name, ratio in CHANNELS.items()
    }
    found["Baselines on layers and dimensions"] = {
        "layer dropping 25 %": (baselines.LayerDropping(0.25),),
        "ShortGPT 25 %": (baselines.ShortGPT(0.25),),
        "SliceGPT 25 %": (baselines.SliceGPT(0.25),),
    }
    found["Baselines on weights and channels"] = {
        f"{title} {name}": (kind(ratio),)
        for name, ratio in CHANNELS.items()
        for title, kind in (
            ("Wanda", baselines.Wanda),
            ("Wanda-sp", baselines.WandaSp),
            ("FLAP", baselines.FLAP),
            ("Probe Pruning", baselines.ProbePruning),
            ("magnitude", baselines.Magnitude),
            ("random", baselines.RandomChannels),
        )
    }
    return found


def folder(name: str) -> Path:
    """Of fitted projections for a ratio by name."""
    return KEPT / f"fitted-{FITTED[name].replace('/', '-')}"


def fit() -> None:
    """Fit what is not fitted yet."""
    for name, ratio in FITTED.items():
        if not folder(name).exists():
            arguments = ["calibrate", "demo", "--ratio", ratio, "--dtype", "bf16", "--output", str(folder(name))]
            subprocess.run([sys.executable, "-m", "stageprune", *arguments], check=True)


def settings(tokenizer: Any) -> tuple[Setting, ...]:
    """All rows, with calibration for the baselines that need it."""
    rows = [
        Setting(f"{heading}: {name}", methods) for heading, row in groups().items() for name, methods in row.items()
    ]
    return with_calibration(rows, tokenizer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=32)
    parser.add_argument("--speed-length", type=int, default=512, help="tokens of the prompt that is timed")
    parser.add_argument("--pairs", type=int, default=3, help="of dense and pruned turns, at least")
    parser.add_argument("--seconds", type=float, default=5, help="to spend on the speed of a setting, at least")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "sweep.json")
    parser.add_argument("--speed-only", action="store_true", help="measure speeds again, of a result that is there")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    KEPT.mkdir(exist_ok=True)
    fit()
    model, tokenizer = load("demo", dtype="bfloat16")
    chosen = settings(tokenizer)
    prompts = held_out_prompts(tokenizer, options.prompts, options.prompt_length)
    run = {key: value for key, value in vars(options).items() if key not in ("out", "threads", "speed_only")}
    run |= {"model": "SmolLM2-135M-Instruct", "dtype": "bfloat16", "torch": torch.__version__}
    kept = _Kept({**run, "settings": digest([one.to_dict() for one in chosen])})
    if options.speed_only:
        data = json.loads(options.out.read_text())
        with Bar() as bar:
            speeds = _speed(model, tokenizer, chosen, options, kept, bar)
        for row in data["rows"]:
            row["speed"] = speeds.get(f"{row['heading']}: {row['name']}")
        _finish(options.out, data, kept)
        return
    with Bar() as bar:
        rows = _quality(model, prompts, chosen, options.answer_tokens, kept, bar)
        speeds = _speed(model, tokenizer, chosen, options, kept, bar)
    bootstrap = Bootstrap()
    result = Evaluation({}, {}, bootstrap, (options.prompt_length,) * len(prompts), rows)
    data = {"run": run, "system": system_info(), "confidence": bootstrap.confidence, "rows": []}
    for row in result.rows:
        metrics = result.metrics(row, "answers")
        heading, _, name = row.name.partition(": ")
        ideal = row.ideal[options.prompt_length]
        data["rows"].append(
            {
                "heading": heading,
                "name": name,
                "methods": [_without_paths(method) for method in row.setting["methods"]],
                **{key: metrics[key].to_dict() for key in ("kl", "agreement", "perplexity", "matched")},
                "ideal": {"prefill": ideal.prefill, "decode": ideal.decode},
                "speed": speeds.get(row.name),
            }
        )
    _finish(options.out, data, kept)


def _finish(out: Path, data: dict[str, Any], kept: _Kept) -> None:
    write_json(out, data)
    kept.remove()
    print(table(data))


def _without_paths(method: dict[str, Any]) -> dict[str, Any]:
    """Which folder the projections were in is nobody's business."""
    return {key: bool(value) if key == "projections" else value for key, value in method.items()}


class _Kept:
    """What is done, in a file; of other settings it is not used."""

    def __init__(self, run: dict[str, Any]) -> None:
        self._run, self._path = run, KEPT / "results.json"
        data = json.loads(self._path.read_text()) if self._path.exists() else {}
        same = data.get("run") == run
        self.progress = Progress.from_dict(data["progress"]) if same else Progress()
        self.speeds: dict[str, Any] = data["speeds"] if same else {}

    def save(self) -> None:
        data = {"run": self._run, "progress": self.progress.to_dict(), "speeds": self.speeds}
        write_file(self._path, json.dumps(data))

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


def _quality(
    model: Any, prompts: list[list[int]], chosen: Sequence[Setting], answer_tokens: int, kept: _Kept, bar: Bar
) -> Any:
    examples = [Example(tuple(prompt), (), len(prompt)) for prompt in prompts]
    task = bar.add_task("quality", total=steps_of(examples, chosen), completed=kept.progress.steps)

    def on_step(progress: Progress) -> None:
        kept.progress = progress
        kept.save()
        bar.update(task, completed=progress.steps)

    return evaluate(model, examples, chosen, answer_tokens=answer_tokens, done=kept.progress, on_step=on_step)


def _speed(
    model: Any, tokenizer: Any, chosen: Sequence[Setting], options: Any, kept: _Kept, bar: Bar
) -> dict[str, Any]:
    task = bar.add_task("speed", total=len(chosen), completed=len(kept.speeds))
    ids = torch.tensor([prompt_of(tokenizer, options.speed_length)])
    length = options.speed_length
    for one in chosen:
        if one.name in kept.speeds:
            continue
        with one.attach(model) as handle:
            warm_up(handle, ids)
            pairs = alternate(handle, ids, 17, pairs=options.pairs, seconds=options.seconds)
            first, rest = prefill_speed(handle, length, pairs), decode_speed(handle, length, pairs)
        kept.speeds[one.name] = {
            "pairs": len(pairs),
            "prefill": first.to_dict(),
            "decode": None if rest is None else rest.to_dict(),
        }
        kept.save()
        bar.advance(task)
    return kept.speeds


def table(data: dict[str, Any]) -> str:
    """All rows under their headings."""
    run, system = data["run"], data["system"]
    lines = [
        f"{run['model']} ({run['dtype']}), {run['prompts']} held-out prompts of {run['prompt_length']} tokens, half of",
        f"them with a question, {run['answer_tokens']} tokens of the dense model's greedy answer each. *KL* in nats a",
        "token; *same prediction*: share of the tokens whose likeliest prediction stays; *equal tokens*: of the pruned",
        f"model's own answer before it first differs; in brackets {data['confidence']:.0%} bootstrap intervals over",
        f"prompts. Speed-ups on a prompt of {run['speed_length']} tokens, and 16 tokens after it, against",
        f"dense turns that alternate, {system['threads']} threads of {system['cpu']}, torch",
        f"{system['torch']}, transformers {system['transformers']}: median (middle half), and the ideal by",
        "operations and bytes. Reproduce with `python benchmarks/sweep.py`.",
    ]
    titles = ("KL", "same prediction", "equal tokens", "first token", "ideal", "generation", "ideal")
    heading = None
    for row in data["rows"]:
        if row["speed"] is None:
            continue
        if row["heading"] != heading:
            heading = row["heading"]
            lines += ["", f"**{heading}**", "", f"| setting | {' | '.join(titles)} |"]
            lines += [f"|---|{'---|' * len(titles)}"]
        cells = [_interval(row["kl"], "{:.3f}".format), _interval(row["agreement"], "{:.1%}".format)]
        cells.append(_interval(row["matched"], "{:.1f}".format))
        for stage in ("prefill", "decode"):
            speed = row["speed"][stage]["speedup"]
            cells.append(f"{speed['median']:.2f}x ({speed['lower']:.2f}-{speed['upper']:.2f})")
            cells.append(f"{row['speed'][stage]['ideal_speedup']:.2f}x")
        lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _interval(estimate: dict[str, float], form: Callable[[float], str]) -> str:
    value, lower, upper = (form(estimate[name]) for name in ("value", "lower", "upper"))
    return f"{value} [{lower}, {upper}]"


if __name__ == "__main__":
    main()
