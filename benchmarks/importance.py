"""Summarise an analysis for the documents: `python benchmarks/importance.py importance.json`.

The analysis itself is

    stageprune analyze demo --samples 200 --batch 8 --threads 2 --output importance.json --plot docs/importance.svg

about 13 minutes on two cores. This keeps the means and errors of each layer in docs/results/importance.json, without
the samples; then `python benchmarks/tables.py` puts the table into docs/importance.md.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from stageprune.files import write_file
from stageprune.prefill.importance import Importance

ROOT = Path(__file__).resolve().parent.parent


def summary(importance: Importance) -> dict[str, Any]:
    """Everything but the samples."""
    data = importance.to_dict()
    tokens = sum(sample.response_tokens for sample in importance.samples)
    return {
        "model": data["model"],
        "settings": data["settings"],
        "response_tokens": tokens / len(importance.samples),
        "nats_per_token": sum(sample.loss for sample in importance.samples) / tokens,
        "largest_bias": importance.largest_bias,
        "layers": data["layers"],
        "drift": data["drift"],
    }


def table(data: dict[str, Any]) -> str:
    """Every layer's importance in both stages, and the drift of the skipped ones."""
    model, settings = data["model"], data["settings"]
    lines = [
        f"SmolLM2-135M-Instruct ({model['dtype']}), {settings['samples']} prompts of at most",
        f"{settings['prompt_tokens']} tokens, responses of {data['response_tokens']:.0f} tokens on average. Mean",
        f"gradients are at most {data['largest_bias']:.1f} standard errors away from 0. Mean squared gradients ±",
        "standard errors; cosines between the full model and the one whose last third is skipped in prefill. Reproduce",
        "with `stageprune analyze demo --samples 200 --batch 8 --threads 2 --output importance.json --plot",
        "docs/importance.svg`.",
        "",
        "| layer | prefill | decode | decode / prefill | cos hidden | cos keys | cos values | cos attention |",
        "|---|---|---|---|---|---|---|---|",
    ]
    drifts = {row["layer"]: row for row in data["drift"]}
    for row in data["layers"]:
        prefill, decode = row["prefill"], row["decode"]
        ratio = f"{decode['importance'] / prefill['importance']:.2f}" if prefill["importance"] else "-"
        drift = drifts.get(row["layer"])
        names = ("hidden_states", "keys", "values", "attention")
        cosines = [f"{drift[name]['mean']:.3f}" if drift else "" for name in names]
        lines.append(
            f"| {row['layer']} | {_estimate(prefill)} | {_estimate(decode)} | {ratio} | {' | '.join(cosines)} |"
        )
    return "\n".join(lines)


def _estimate(one: dict[str, float]) -> str:
    return f"{one['importance']:.3g} ± {one['standard_error']:.2g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("analysis", type=Path)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "importance.json")
    options = parser.parse_args()
    write_file(options.out, json.dumps(summary(Importance.load(options.analysis)), indent=1) + "\n")


if __name__ == "__main__":
    main()
