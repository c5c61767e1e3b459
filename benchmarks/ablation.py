"""The paper's ablations (arXiv 2602.03295, Table 3), in kind, on the demo model: `python benchmarks/ablation.py`.

Which layers the prompt skips (deep, interleaved, shallow), and what happens without the K/V projection or without the
boundary rule. Measured is the closeness to the dense model on its own answers. Writes docs/results/ablation.json and
the table docs/ablation.md. A few minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from common import held_out_prompts, standard_error
from rich.progress import Progress

import stageprune as sp
from stageprune.evaluate.quality import Quality, closeness, dense_cases
from stageprune.models import load

ROOT = Path(__file__).resolve().parent.parent
THIRD = 1 / 3
VARIANTS = {
    "last third (the method)": sp.PrefillOnlyPruning(THIRD, "last"),
    "last half": sp.PrefillOnlyPruning(1 / 2, "last"),
    "every third layer": sp.PrefillOnlyPruning(THIRD, "interleaved"),
    "first third": sp.PrefillOnlyPruning(THIRD, "first"),
    "last third, no K/V projection": sp.PrefillOnlyPruning(THIRD, kv_projection=False),
    "last third, no boundary rule": sp.PrefillOnlyPruning(THIRD, boundary=False),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--prompt-length", type=int, default=384)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder for the table and the JSON")
    options = parser.parse_args()

    model, tokenizer = load("demo", dtype="float32")
    prompts = held_out_prompts(tokenizer, options.prompts, options.prompt_length)
    results: dict[str, Quality] = {}
    with Progress() as progress:
        task = progress.add_task("dense answers", total=len(prompts))
        cases = dense_cases(model, prompts, options.new_tokens, lambda: progress.advance(task))
        for name, method in VARIANTS.items():
            task = progress.add_task(name, total=len(prompts))
            with sp.prune(model, method) as handle:
                results[name] = closeness(handle, cases, lambda task=task: progress.advance(task))
    write(options.out, results, vars(options))


def write(folder: Path, results: dict[str, Quality], options: dict[str, object]) -> None:
    settings = {name: value for name, value in options.items() if name != "out"}
    data = {
        "settings": {**settings, "model": "SmolLM2-135M-Instruct", "dtype": "float32", "torch": torch.__version__},
        "variants": {name: VARIANTS[name].to_dict() | quality.to_dict() for name, quality in results.items()},
    }
    (folder / "results").mkdir(parents=True, exist_ok=True)
    (folder / "results" / "ablation.json").write_text(json.dumps(data, indent=1) + "\n")
    (folder / "ablation.md").write_text(table(data))
    print(table(data))


def table(data: dict) -> str:
    settings = data["settings"]
    lines = [
        "# What each part of prefill-only pruning is worth",
        "",
        "The ablations of arXiv 2602.03295 (Table 3), in kind, on SmolLM2-135M-Instruct: KL divergence from the dense",
        "model per token of its own greedy answers, and the share of tokens whose likeliest prediction stays the same.",
        f"{settings['prompts']} prompts of {settings['prompt_length']} tokens of technical prose (half of them with a "
        f"question), {settings['new_tokens']} answer tokens each;",
        "± is the standard error over prompts. Reproduce with `python benchmarks/ablation.py`.",
        "",
        "| prompt skips | KL (nats per token) | same prediction |",
        "|---|---|---|",
    ]
    for name, row in data["variants"].items():
        kl, same = (standard_error(row[key]) for key in ("kl_per_prompt", "agreement_per_prompt"))
        lines.append(f"| {name} | {row['kl']:.3f} ± {kl:.3f} | {row['agreement']:.1%} ± {same:.1%} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
