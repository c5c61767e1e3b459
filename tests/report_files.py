"""Small result files of every kind, with names that would do harm where they are not escaped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stageprune.evaluate.plan import Bound, Plan, Point
from stageprune.prefill.importance import Drift, Importance, SampleScore
from stageprune.records import write_record

EVIL = '<script>alert(1)</script> | $x$ "q" [a](http://evil.example/) `c` &amp; *b*'
SYSTEM = {"stageprune": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0", "cpu": "A & B <cpu>", "threads": 2}


def spread(median: float, width: float = 0.1) -> dict[str, float]:
    return {"median": median, "lower": median - width, "upper": median + width, "count": 5}


def bench(folder: Path, name: str = "bench.json", model: str = "tiny", **changes: Any) -> Path:
    """The first token at two lengths, and generation."""
    prefill = [
        {
            "ratio": 0.5,
            "methods": [{"method": "prefill-only-pruning", "ratio": 0.5, "layers": "last"}],
            "skipped_layers": 2,
            "ffn_bytes": 1.0,
            "backends": [],
            "batch": 1,
            "prompt_length": length,
            "pairs": 5,
            "prefill": {
                "dense_s": spread(2.0),
                "pruned_s": spread(2.0 / speedup),
                "speedup": spread(speedup),
                "ideal_speedup": 1.9,
            },
            "memory": {"dense_bytes": 2_000_000, "pruned_bytes": None},
            "decode": None,
        }
        for length, speedup in ((32, 1.25), (2048, 1.75))
    ]
    channels = {"method": "online-channel-pruning", "ratio": 0.2, "mlp_ratio": None, "partition_fraction": 0.1}
    decode = {
        **prefill[0],
        "ratio": None,
        "methods": [{**channels, "selection": "partition"}],
        "backends": ["indexed"],
        "prefill": None,
        "memory": None,
        "decode": {
            "dense_tokens_per_s": spread(10.0),
            "pruned_tokens_per_s": spread(12.5),
            "speedup": spread(1.25),
            "ideal_speedup": 1.5,
            "break_even_tokens": None,
        },
    }
    data = {"command": f"stageprune bench --model {model}", "model": model, "dtype": "float32", "system": SYSTEM}
    return write(folder / name, {**data, "cells": [*prefill, decode], **changes})


def plan(folder: Path, model: str = "tiny") -> Path:
    """Of four layers; skipping the last two is best, and half of the quality."""
    points = tuple(
        Point(tuple(range(4 - count, 4)), ("last",), 100 - 20 * count, 0.05 * count**2, 0.01, 1 - 0.1 * count, 0.02)
        for count in (1, 2, 3)
    )
    settings = {"count": 3, "data": "held-out text", "prompt_tokens": 64, "answer_tokens": 4}
    path = folder / "plan.json"
    Plan({"name": model, "num_hidden_layers": 4}, settings, Bound(max_kl=0.2), 100, points).save(path)
    return path


def importance(folder: Path, model: str = "tiny") -> Path:
    """Two samples of four layers."""
    drift = Drift((1.0, 0.9), (1.0, 0.8), (1.0, 0.7), (1.0, 0.95))
    samples = tuple(
        SampleScore(index, 8, 4, 1.0, (3.0 + index, 2.0, 1.0, 0.0), (4.0, 3.0, 2.0 + index, 1.0), drift)
        for index in (0, 1)
    )
    settings = {"data": "d.jsonl", "samples": 2, "command": "stageprune analyze tiny", "system": SYSTEM}
    path = folder / "importance.json"
    Importance({"name": model, "dtype": "float32"}, settings, samples).save(path)
    return path


def channels(folder: Path, rule: str = "full") -> Path:
    """Three rules, one of which the others beat."""
    rows = {"paper": (0.8, [0.1, 0.3]), "worse": (0.9, [0.4, 0.4]), rule: (0.9, [0.01, 0.03])}
    points = {
        name: {"settings": {}, "bytes": share, "kl_per_prompt": kl, "agreement_per_prompt": [0.8, 0.9]}
        for name, (share, kl) in rows.items()
    }
    run = {"prompts": 2, "prompt_length": 16, "model": "tiny", "dtype": "float32", "torch": "2.13.0"}
    return write(folder / "channels.json", {"run": run, "points": points})


def compare(folder: Path) -> Path:
    """Two layers, three generated tokens."""
    seen = {"tokens": 3, "turnover": 0.25, "overlap": [0.9, 0.8, 0.7], "rank_difference": [0.1, 0.1, 0.2]}
    rows = [{"layer": 0, "observed": None}, {"layer": 1, "observed": seen}]
    data = {"model": "tiny", "dtype": "float32", "system": SYSTEM, "teacher_forced_agreement": 1.0, "prefill": {}}
    return write(folder / "compare.json", {**data, "report": {"channels": rows}})


def evaluation(folder: Path, name: str = "a baseline") -> Path:
    """The dense model, one setting, and one baseline that prunes generation only; one bucket."""

    def row(setting: str, method: str | None, kl: float, prefill: float, decode: float) -> dict[str, Any]:
        def estimate(value: float) -> dict[str, float]:
            return {"value": value, "lower": value * 0.9, "upper": value * 1.1}

        metrics = {"kl": estimate(kl), "agreement": estimate(0.8), "perplexity": estimate(9.0)}
        answers = {"answers": {**metrics, "matched_share": estimate(0.5)}, "references": {}}
        return {
            "setting": {"name": setting, "methods": [] if method is None else [{"method": method}]},
            "ideal": {"64": {"prompt_tokens": 60, "prefill": prefill, "decode": decode}},
            "summary": {"all": answers, "64": answers},
        }

    rows = [
        row("dense", None, 0.0, 1.0, 1.0),
        row("layers 0.5", "prefill-only-pruning", 0.2, 1.9, 1.0),
        row(name, "wanda", 0.4, 1.0, 1.2),
    ]
    settings = {"count": 7, "data": "t.jsonl", "command": "stageprune eval tiny", "system": SYSTEM}
    path = folder / "eval.json"
    write_record(path, "stageprune-eval", 1, {"model": {"name": "tiny"}, "settings": settings, "rows": rows})
    return path


def write(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
