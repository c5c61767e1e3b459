"""Quality of every rule of channel pruning at its number of bytes: `python benchmarks/channels.py`.

Closeness to the dense model on its own answers, for the paper's rule and its variants over partition fractions and
ratios, and for the rules beyond the paper. Writes docs/results/channels.json and the plot docs/channels.svg; then
`python benchmarks/tables.py` puts the table into docs/channels.md. Finished settings are kept in channels.json.partial,
so that an interrupted run goes on. About 25 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from common import held_out_prompts, standard_error, write_json
from rich.progress import Progress

import stageprune as sp
from stageprune.evaluate.figure import new_figure, save_figure
from stageprune.evaluate.quality import closeness, dense_cases
from stageprune.methods.online_channels import PRESETS
from stageprune.models import load

ROOT = Path(__file__).resolve().parent.parent
PAPER = "paper"
CASCADE = dict(selection="cascade", pruned_share=0.0)


def settings() -> dict[str, dict[str, Any]]:
    """Name of each point: its settings."""
    found: dict[str, dict[str, Any]] = {PAPER: dict(mlp_ratio=0.3)}
    for gamma in (0.05, 0.2, 0.3, 0.58):
        found[f"paper, γ {gamma:g}"] = dict(mlp_ratio=0.3, partition_fraction=gamma)
    for ratio in (0.2, 0.4, 0.6):
        found[f"paper, r {ratio:g}"] = dict(mlp_ratio=ratio)
    found["paper, prompt at the budget"] = dict(mlp_ratio=0.3, prefill="budget")
    found["paper, prompt dense"] = dict(mlp_ratio=0.3, prefill="dense")
    for every in (8, 32):
        found[f"paper, refresh {every}"] = dict(mlp_ratio=0.3, refresh=every)
    found["paper, ends protected"] = dict(mlp_ratio=0.3, protect=[0, 1, 28, 29])
    found["fixed (variant 1)"] = dict(mlp_ratio=0.3, selection="fixed")
    found["fixed, refresh 8"] = dict(mlp_ratio=0.3, selection="fixed", refresh=8)
    for active in (0.25, 0.3, 0.4, 0.7):
        found[f"full (variant 2), {active:.0%} active"] = dict(mlp_ratio=1 - active, selection="full", pruned_share=0.0)
    for pruned in (0.05, 0.1, 0.15):
        for active in (0.3, 0.4, 0.5):
            found[f"partition, {pruned:.0%} pruned, {active:.0%} active"] = dict(
                mlp_ratio=1 - active, pruned_share=pruned
            )
    for active in (0.5, 0.6, 0.65):
        found[f"gate, {active:.0%} active"] = dict(mlp_ratio=1 - active, selection="gate", pruned_share=0.0)
    for up, active in ((0.5, 0.35), (0.55, 0.4), (0.6, 0.45), (0.65, 0.45), (0.7, 0.5), (0.75, 0.5), (0.8, 0.6)):
        found[f"cascade, {up:.0%} up, {active:.0%} active"] = dict(mlp_ratio=1 - active, up_share=up, **CASCADE)
    for name, preset in PRESETS.items():
        if name != PAPER:
            found[f"preset {name}"] = dict(preset)
    return found


def family(name: str) -> str:
    """Which curve of the plot a point belongs to."""
    return name.split(",")[0].split(" (")[0].split(" ")[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-length", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for the plot and the JSON")
    options = parser.parse_args()
    run = {
        "prompts": options.prompts,
        "prompt_length": options.prompt_length,
        "new_tokens": options.new_tokens,
        "model": "SmolLM2-135M-Instruct",
        "dtype": "float32",
        "torch": torch.__version__,
    }
    (options.out / "results").mkdir(parents=True, exist_ok=True)
    target = options.out / "results" / "channels.json"
    partial = target.with_suffix(".json.partial")
    data = _earlier(partial, run)
    missing = {name: one for name, one in settings().items() if data["points"].get(name, {}).get("settings") != one}
    if missing:
        model, tokenizer = load("demo", dtype="float32")
        prompts = held_out_prompts(tokenizer, options.prompts, options.prompt_length)
        with Progress() as progress:
            task = progress.add_task("dense answers", total=len(prompts))
            cases = dense_cases(model, prompts, options.new_tokens, lambda: progress.advance(task))
            task = progress.add_task("settings", total=len(missing))
            for name, one in missing.items():
                with sp.prune(model, sp.OnlineChannelPruning(backend="masked", **one)) as handle:
                    report = handle.report()
                    quality = closeness(handle, cases)
                data["points"][name] = {
                    "settings": one,
                    "bytes": round(_bytes(one, report), 6),
                    **quality.to_dict(),
                }
                write_json(partial, data)
                progress.advance(task)
    data["points"] = {name: data["points"][name] for name in settings()}
    write_json(target, data)
    partial.unlink(missing_ok=True)
    plot(data, options.out / "channels.svg")
    print(table(data))


def _bytes(one: dict[str, Any], report: sp.Report) -> float:
    """Share of the model's FFN weights that a generated token reads, refreshing tokens included."""
    layer = report.channels[0]
    pruned = len(report.channels) / report.num_hidden_layers
    share = pruned * layer.weights / layer.dense_weights + (1 - pruned)
    if one.get("refresh"):  # every n-th token computes all gates and ups
        sizes = layer.sizes
        whole = (2 * sizes.total + sizes.active) / (3 * sizes.total)
        share += (whole - share) / one["refresh"]
    return share


def _earlier(partial: Path, run: dict[str, Any]) -> dict[str, Any]:
    if partial.exists():
        data = json.loads(partial.read_text())
        if data["run"] == run:
            return data
    return {"run": run, "points": {}}


def table(data: dict[str, Any]) -> str:
    """The points by bytes, with their settings."""
    run = data["run"]
    paper = data["points"][PAPER]["kl"]
    lines = [
        f"SmolLM2-135M-Instruct, {run['prompts']} held-out prompts of {run['prompt_length']} tokens, half of them with",
        f"a question; {run['new_tokens']} tokens of the dense model's own greedy answer each. *Bytes*: share of FFN",
        "weights that a generated token reads. KL in nats per token, ± its standard error over prompts. Reproduce with",
        "`python benchmarks/channels.py`.",
        "",
        "| rule | bytes | KL | KL / paper's | same prediction |",
        "|---|---|---|---|---|",
    ]
    for name, point in sorted(data["points"].items(), key=lambda item: (item[1]["bytes"], item[1]["kl"])):
        error = standard_error(point["kl_per_prompt"])
        lines.append(
            f"| {'**' * _notable(name)}{name}{'**' * _notable(name)} | {point['bytes']:.3f} | {point['kl']:.3f} ± "
            f"{error:.3f} | {point['kl'] / paper:.2f} | {point['agreement']:.1%} |"
        )
    return "\n".join(lines)


def _notable(name: str) -> bool:
    return name == PAPER or name.startswith("preset")


def plot(data: dict[str, Any], path: Path) -> None:
    """KL over bytes, a curve for each rule."""
    figure = new_figure(8, 5)
    axes = figure.subplots()
    families: dict[str, list[tuple[float, float]]] = {}
    for name, point in data["points"].items():
        families.setdefault(family(name), []).append((point["bytes"], point["kl"]))
    for marker, (name, points) in zip("osD^vPX*", families.items(), strict=False):
        style = "-" if name == "cascade" else ""
        axes.plot(
            *zip(*sorted(points), strict=True), marker + style, label=name, markersize=11 if name == "preset" else 6
        )
    axes.axvline(0.75, color="grey", linewidth=0.8, linestyle=":")
    axes.axhline(data["points"][PAPER]["kl"] / 3, color="grey", linewidth=0.8, linestyle=":")
    axes.set(yscale="log", xlabel="FFN weight bytes per token / dense", ylabel="KL from dense, nats per token")
    axes.set_title("SmolLM2-135M-Instruct: quality of each rule at its bytes")
    axes.legend()
    axes.grid(alpha=0.3, which="both")
    save_figure(figure, path)


if __name__ == "__main__":
    main()
