"""Where the time of a decode step goes, dense and pruned: `python benchmarks/decode_split.py`.

The ideal speed-up of a step counts bytes, as if all its time went into reading weights and cache. This measures how
much of the demo model's step the FFNs take, and so what pruning them can reach at most. Writes
docs/results/decode-split.json; then `python benchmarks/tables.py` puts the table into docs/channels.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from common import held_out_prompts

import stageprune as sp
from stageprune.evaluate.alternation import alternate_turns
from stageprune.evaluate.clock import timed_generate
from stageprune.evaluate.system import system_info
from stageprune.files import write_file
from stageprune.models import load
from stageprune.overrides import MethodOverride

ROOT = Path(__file__).resolve().parent.parent


@contextmanager
def ffn_clock(model: Any) -> Iterator[list[float]]:
    """The seconds that each call of an FFN takes inside the block."""
    seconds: list[float] = []
    modules = [layer.mlp for layer in model.model.layers]

    def timed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        output = forward(*args, **kwargs)
        seconds.append(time.perf_counter() - start)
        return output

    active = [MethodOverride(module, "forward", timed) for module in modules]
    try:
        yield seconds
    finally:
        for override in reversed(active):
            override.remove()


def turn(model: Any, handle: sp.Handle, prompt: torch.Tensor, new_tokens: int, dense: bool) -> tuple[float, float]:
    """Medians over the steps of one answer: seconds of a step, and of all its FFNs."""
    with ffn_clock(model) as seconds:
        if dense:
            with handle.dense():
                answer = timed_generate(model, prompt, new_tokens, stop_early=False)
        else:
            answer = timed_generate(model, prompt, new_tokens, stop_early=False)
    layers = len(model.model.layers)
    steps = [sum(seconds[start : start + layers]) for start in range(layers, len(seconds), layers)]
    assert answer.token_s is not None
    return answer.token_s, statistics.median(steps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ratios", default="0.22475,0.4495")
    parser.add_argument("--lengths", default="128,1024")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--seconds", type=float, default=30)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results" / "decode-split.json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = load("demo", dtype="bfloat16")
    cells = []
    for length in map(int, options.lengths.split(",")):
        prompt = torch.tensor([held_out_prompts(tokenizer, 1, length)[0]])
        for ratio in map(float, options.ratios.split(",")):
            with sp.prune(model, sp.OnlineChannelPruning(ratio=ratio)) as handle:

                def one(dense: bool, handle: sp.Handle = handle, prompt: torch.Tensor = prompt) -> tuple[float, float]:
                    return turn(model, handle, prompt, options.new_tokens, dense)

                ffn_speedup = handle.report().ideal_ffn_speedup
                one(True), one(False)
                pairs = alternate_turns(one, pairs=5, seconds=options.seconds)
            medians = [[statistics.median(pair[kind][what] for pair in pairs) for what in (0, 1)] for kind in (0, 1)]
            cells.append(
                {
                    "ffn_bytes": 1 / ffn_speedup,
                    "prompt_length": length,
                    "pairs": len(pairs),
                    "dense_step_s": medians[0][0],
                    "dense_ffn_s": medians[0][1],
                    "pruned_step_s": medians[1][0],
                    "pruned_ffn_s": medians[1][1],
                }
            )
            print(json.dumps(cells[-1]), flush=True)
    content = {"system": system_info(), "dtype": "bfloat16", "new_tokens": options.new_tokens, "cells": cells}
    write_file(options.out, json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
