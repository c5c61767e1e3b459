"""A synthetic language that a small model learns in minutes: short programs on lists of letters.

A prompt is `<begin> task letters... =`, its answer letters and `<end>`:

    copy b d a = b d a        reverse b d a = a d b        sort b d a = a b d
    shift-2 b d a = d f c     (each letter advanced by 1 to 4, the last one followed by the first)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LETTERS = range(8, 32)
PAD, BEGIN, END, EQUALS = range(4)
VOCAB_SIZE = 40
TASKS = {"copy": 32, "reverse": 33, "sort": 34, "shift": 35}
SHIFTS = range(1, 5)  # shift-1 is token 35, and so on
LENGTHS = range(6, 15)


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def example(generator: random.Random, task: str | None = None) -> Example:
    """A random example, of a random task if none is named."""
    task = task or generator.choice(list(TASKS))
    letters = [generator.choice(LETTERS) for _ in range(generator.choice(LENGTHS))]
    shift = generator.choice(SHIFTS) if task == "shift" else 0
    answer = {"reverse": letters[::-1], "sort": sorted(letters)}.get(task, [shifted(one, shift) for one in letters])
    return Example(task, (BEGIN, TASKS[task] + max(shift - 1, 0), *letters, EQUALS), (*answer, END))


def shifted(letter: int, by: int) -> int:
    """The letter that comes `by` places later."""
    return LETTERS[(letter - LETTERS[0] + by) % len(LETTERS)]
