"""The synthetic tasks that small models are trained on say what is true."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import list_tasks
import shapes


@pytest.mark.parametrize("task", list_tasks.TASKS)
def test_lists_are_answered_rightly(task: str) -> None:
    generator = random.Random(0)
    for _ in range(50):
        one = list_tasks.example(generator, task)
        begin, name, *letters, equals = one.prompt
        *answer, end = one.answer
        assert (begin, equals, end) == (list_tasks.BEGIN, list_tasks.EQUALS, list_tasks.END)
        first = list_tasks.LETTERS[0]
        by = name - list_tasks.TASKS["shift"] + 1
        expected = {
            "copy": letters,
            "reverse": list(reversed(letters)),
            "sort": sorted(letters),
            "shift": [(letter - first + by) % 24 + first for letter in letters],
        }
        assert answer == expected[task]
        assert name == list_tasks.TASKS[task] or (task == "shift" and 1 <= by <= 4)


def test_counts_are_of_what_the_image_shows() -> None:
    """Objects are found again in the pixels: cells brighter than the noise, their colour and their shape."""
    generator = random.Random(0)
    for _ in range(50):
        one = shapes.example(generator, "describe")
        seen: dict[tuple[str, str], int] = {}
        cells = one.image.reshape(3, shapes.GRID, shapes.CELL, shapes.GRID, shapes.CELL).permute(1, 3, 0, 2, 4)
        for cell in cells.reshape(-1, 3, shapes.CELL, shapes.CELL):
            lit = cell > 0.5
            if not lit.any():
                continue
            channels = tuple(bool(channel.any()) for channel in lit)
            colour = {(1, 0, 0): "red", (0, 1, 0): "green", (0, 0, 1): "blue", (1, 1, 0): "yellow"}[channels]
            shape = {36: "square", 32: "ring", 20: "cross"}[int(lit.any(0).sum())]
            seen[colour, shape] = seen.get((colour, shape), 0) + 1
        kinds = sorted(seen, key=lambda kind: (shapes.COLOURS[kind[0]], shapes.SHAPES[kind[1]]))
        expected = [
            token
            for kind in kinds
            for token in (shapes.COUNTS[seen[kind]], shapes.COLOURS[kind[0]], shapes.SHAPES[kind[1]])
        ]
        assert [*expected, shapes.END] == list(one.answer)


def test_patches_of_an_image_token_follow_each_other() -> None:
    """By hand: token t is the cell in row t // 4 and column t % 4, its four patches row by row, both frames alike."""
    image = torch.arange(3 * 32 * 32, dtype=torch.float64).reshape(3, 32, 32)
    rows = shapes.patches(image[None])
    assert rows.shape == (64, 96)
    for token in range(16):
        for patch in range(4):
            top = token // 4 * 8 + patch // 2 * 4
            left = token % 4 * 8 + patch % 2 * 4
            expected = image[:, None, top : top + 4, left : left + 4].expand(3, 2, 4, 4)
            assert torch.equal(rows[4 * token + patch], expected.reshape(-1))
