"""What fitted K/V projections cost at run time: `python benchmarks/fitted_speed.py`.

Measures the time to the first token with them over that with the layers' own weights. Both skip the same third of the
demo model's layers and take turns on the same prompts. What the projections are fitted on does not matter here. Writes
docs/results/fitted-speed.json; then `python benchmarks/tables.py` puts it into docs/calibrate.md.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

import stageprune as sp
from stageprune.evaluate.alternation import alternate_turns
from stageprune.evaluate.calibration import Reading, solve
from stageprune.evaluate.clock import timed_generate
from stageprune.evaluate.samples import load_prompts
from stageprune.evaluate.spread import Spread
from stageprune.evaluate.system import system_info
from stageprune.evaluate.text import prompt_of
from stageprune.files import write_file
from stageprune.models import load
from stageprune.prefill.layers import skipped_layers
from stageprune.prefill.projections import KVProjections, identity

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="512,2048")
    parser.add_argument("--seconds", type=float, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "fitted-speed.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load("demo", dtype="bfloat16")
    layers = skipped_layers(sp.PrefillOnlyPruning(), len(model.model.layers))
    reading = Reading(model, layers)
    reading.read(load_prompts(tokenizer, None, 4, 64, 0).tokens)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "fit"
        record = {"model": identity(reading.decoder, reading.own), "settings": {}, "measured": []}
        KVProjections({one.layer: one.correction for one in solve(reading, 1e-3, None)}, record).save(folder)
        methods = {
            True: sp.PrefillOnlyPruning(layers=layers),
            False: sp.PrefillOnlyPruning(layers=layers, projections=str(folder)),
        }
        for length in map(int, options.lengths.split(",")):
            prompt = torch.tensor([prompt_of(tokenizer, length)])

            def turn(own: bool, prompt: torch.Tensor = prompt) -> float:
                with sp.prune(model, methods[own]):
                    timed_generate(model, prompt[:, :8], 1)  # what attaching left to do is not the prompt's
                    return timed_generate(model, prompt, 1).first_token_s

            turn(True), turn(False)
            pairs = alternate_turns(turn, pairs=9, seconds=options.seconds)
            ratios = Spread.of([fitted / own for own, fitted in pairs])
            own, fitted = (Spread.of([pair[place] for pair in pairs]) for place in (0, 1))
            cells.append(
                {
                    "prompt_length": length,
                    "pairs": len(pairs),
                    "own_s": own.median,
                    "fitted_s": fitted.median,
                    "ratio": ratios.to_dict(),
                }
            )
            print(json.dumps(cells[-1]), flush=True)
    content = {"system": system_info(), "dtype": "bfloat16", "cells": cells}
    write_file(options.out, json.dumps(content, indent=1) + "\n")


def table(data: dict[str, Any]) -> str:
    """The two times and their ratio."""
    lines = [
        f"Time to the first token of SmolLM2-135M-Instruct ({data['dtype']}), a third skipped, own and fitted",
        f"projections in turns, {data['system']['threads']} threads. Reproduce with",
        "`python benchmarks/fitted_speed.py`.",
        "",
        "| prompt | own weights | fitted | ratio (median of pairs) | middle half | pairs |",
        "|---|---|---|---|---|---|",
    ]
    for cell in data["cells"]:
        ratio = cell["ratio"]
        lines.append(
            f"| {cell['prompt_length']:,} tokens | {cell['own_s'] * 1e3:,.0f} ms | {cell['fitted_s'] * 1e3:,.0f} ms "
            f"| {ratio['median']:.3f} | {ratio['lower']:.3f}-{ratio['upper']:.3f} | {cell['pairs']} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
