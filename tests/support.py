"""Which model classes each method supports, found by pruning a tiny model of each: `python tests/support.py`.

Records what the installed transformers gives in docs/results/support.json, beside what other versions gave, and writes
the tables of docs/support.md. `test_support.py` checks that both still say what is found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("src", "tests")]

import stageprune as sp
from families.test_verify import REFUSED
from helpers import tokens
from sam_zoo import build as segment_anything
from sam_zoo import images
from stageprune.files import write_file
from vlm_zoo import PROMPTS, VISION_MODELS
from zoo import ARCHITECTURES, MIXTURES, MORE

ROOT = Path(__file__).resolve().parent.parent
RESULTS, DOCUMENT = ROOT / "docs" / "results" / "support.json", ROOT / "docs" / "support.md"
METHODS: dict[str, Any] = {
    "prefill": sp.PrefillOnlyPruning(1 / 2),
    "channels": sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3),
}
GROUPS = ("text", "mixture of experts", "vision-language", "image encoder", "refused")
YES = "yes"

Found = dict[str, dict[str, str]]
"""Class name: its group, and for each method `yes` or why not."""


def cases() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], Any]]]:
    """Group, how to build a model, and how to run it once."""
    for group, architectures in (("text", ARCHITECTURES + MORE), ("mixture of experts", MIXTURES)):
        for architecture in architectures:
            yield group, lambda one=architecture: one.build(torch.float32), _generate
    for kind in VISION_MODELS:
        yield (
            "vision-language",
            lambda kind=kind: kind.build(torch.float32),
            lambda model, kind=kind: model.generate(**kind.inputs(model, PROMPTS["one image"]), max_new_tokens=2),
        )
    for name in ("Sam", "SamHQ"):
        yield "image encoder", lambda name=name: segment_anything(name), lambda model: model(**images(1))
    for build, _ in REFUSED.values():
        yield "refused", build, lambda model: None


@cache
def found() -> Found:
    """What the installed transformers gives; a class with several configurations is supported if all of them are."""
    result: Found = {}
    for group, build, run in cases():
        model = build()
        row = result.setdefault(type(model).__name__, {"group": group, **dict.fromkeys(METHODS, YES)})
        for name, method in METHODS.items():
            answer = _answer(model, method, run)
            row[name] = answer if row[name] == YES else row[name]
    return result


@torch.no_grad()
def _answer(model: Any, method: Any, run: Callable[[Any], Any]) -> str:
    try:
        with sp.prune(model, method):
            run(model)
    except sp.StagePruneError as error:
        return " ".join(str(error).split())
    return YES


def _generate(model: Any) -> Any:
    return model.generate(tokens(1, 6), max_new_tokens=2, do_sample=False)


def recorded() -> dict[str, Found]:
    """By version of transformers."""
    data: dict[str, Found] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    return dict(sorted(data.items(), key=lambda item: Version(item[0]), reverse=True))


def document(results: dict[str, Found]) -> str:
    """The page, from what is recorded."""
    versions = list(results)
    lines = [
        "# Supported models",
        "",
        "Found by pruning a tiny model of each class and running it (`python tests/support.py`); a test fails when",
        "this page differs from what is found. Every description is checked again on your model when pruning begins.",
        "`stageprune doctor MODEL` says what holds for any configuration.",
    ]
    for group in GROUPS[:-1]:
        lines += ["", f"## {group.capitalize()}", "", f"| class | {' | '.join(_columns(versions))} |"]
        lines += [f"|---|{'---|' * len(versions) * len(METHODS)}"]
        names = sorted({name for found in results.values() for name, row in found.items() if row["group"] == group})
        lines += [f"| `{name}` | {' | '.join(_cells(results, name))} |" for name in names]
    newest = results[versions[0]]
    lines += ["", "## Refused", "", f"With transformers {versions[0]}, in the words of the error.", ""]
    lines += ["| class | prefill-only pruning | channel pruning |", "|---|---|---|"]
    for name, row in sorted(newest.items()):
        if row["group"] == "refused":
            lines.append(f"| `{name}` | {row['prefill']} | {row['channels']} |")
    return "\n".join(lines) + "\n"


def _columns(versions: list[str]) -> list[str]:
    titles = {"prefill": "prefill-only", "channels": "channels"}
    return [f"{titles[method]}, {version}" for method in METHODS for version in versions]


def _cells(results: dict[str, Found], name: str) -> list[str]:
    rows = [(found.get(name), method) for method in METHODS for found in results.values()]
    return ["not there" if row is None else "yes" if row[method] == YES else "no" for row, method in rows]


def write() -> None:
    """Record what is found, and write the page."""
    results = recorded() | {transformers.__version__: found()}
    write_file(RESULTS, json.dumps(results, indent=1, sort_keys=True) + "\n")
    write_file(DOCUMENT, document(recorded()))


if __name__ == "__main__":
    write()
