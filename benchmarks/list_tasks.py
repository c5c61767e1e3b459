"""A synthetic language that a small model learns in minutes: short programs on lists of letters.

A prompt is `<begin> task letters... =`, its answer letters and `<end>`:

    copy b d a = b d a          reverse b d a = a d b          sort b d a = a b d
    lookup b x d y a z ? d b = y x          (the letters after the keys d and b)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

LETTERS = tuple(range(8, 32))
PAD, BEGIN, END, EQUALS, QUERY = range(5)
VOCAB_SIZE = 40
TASKS = {"copy": 32, "reverse": 33, "sort": 34, "lookup": 35}
LIST_LENGTHS = range(6, 13)
PAIRS, ASKED = range(5, 9), 4


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def example(generator: random.Random, task: str | None = None) -> Example:
    """A random example, of a random task if none is named."""
    task = task or generator.choice(list(TASKS))
    if task == "lookup":
        keys = generator.sample(LETTERS, generator.choice(PAIRS))
        table = {key: generator.choice(LETTERS) for key in keys}
        asked = generator.sample(keys, ASKED)
        body = [*(token for pair in table.items() for token in pair), QUERY, *asked]
        answer = [table[key] for key in asked]
    else:
        body = [generator.choice(LETTERS) for _ in range(generator.choice(LIST_LENGTHS))]
        answer = {"copy": body, "reverse": body[::-1], "sort": sorted(body)}[task]
    return Example(task, (BEGIN, TASKS[task], *body, EQUALS), (*answer, END))
