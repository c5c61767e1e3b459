"""Commands that go on after an interruption, killed at every moment of their writing: nothing broken, little lost."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from killing import MOMENTS_OF_A_WRITE, killed_at

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")

COMMON = ("--threads", "1", "--dtype", "float32", "--prompt-tokens")
COMMANDS = {
    "analyze": (("analyze", "--samples", "2", "--batch", "1", "--response-tokens", "3", *COMMON, "12"), ["samples"]),
    "plan": (
        ("plan", "--max-kl", "0.1", "--search", "rules", "--prompts", "1", "--answer-tokens", "2", *COMMON, "40"),
        ["answers", "points"],
    ),
    "eval": (
        ("eval", "--no-cache", "--prompts", "1", "--answer-tokens", "2", "--lengths", "40,50", *COMMON[:-1]),
        ["answers", "scores"],
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_killed_at_any_moment(name: str, command, tiny: Path, tmp_path: Path) -> None:
    (verb, *options), parts = COMMANDS[name]
    whole = tmp_path / "whole" / "o.json"  # the file records its name
    whole.parent.mkdir()
    assert command(verb, tiny, *options, "--output", whole).code == 0
    kills = 0
    for moment in count():
        folder = tmp_path / str(moment)
        folder.mkdir()
        output, partial = folder / "o.json", folder / "o.json.partial"
        arguments = (verb, tiny, *options, "--output", output)
        if not killed_at(moment, arguments):
            break
        kills += 1
        if output.exists():
            assert output.read_bytes() == whole.read_bytes()
        written = moment // MOMENTS_OF_A_WRITE + (moment % MOMENTS_OF_A_WRITE == 2)
        if written:
            found = json.loads(partial.read_text())
            steps = sum(_count(found[part]) for part in parts)
            assert steps == written - output.exists(), "more than the current step is lost"
        result = command(*arguments)
        assert result.code == 0, (moment, result.err)
        assert ("going on" in result.err) == (written > 0)
        assert output.read_bytes() == whole.read_bytes(), moment
        assert [path.name for path in folder.iterdir()] == ["o.json"]
    steps = {"analyze": 2, "plan": 3, "eval": 4}[name]
    assert kills == (steps + 1) * MOMENTS_OF_A_WRITE + 1, "each step, the result, and the end of the partial file"


def _count(part: list[Any]) -> int:
    """Steps in a list of them, or of lists of them: scores are kept by setting."""
    return sum(map(len, part)) if part and isinstance(part[0], list) and not _is_answer(part[0]) else len(part)


def _is_answer(part: list[Any]) -> bool:
    return bool(part) and isinstance(part[0], int)
