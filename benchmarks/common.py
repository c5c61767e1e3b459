"""What the quality benchmarks have in common: the prompts that they measure on, and the error of a mean over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev
from typing import Any

from stageprune.evaluate.text import prompt_of

QUESTION = "Summarise the text above in a few sentences."


def held_out_prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Prompts of held-out prose, every second one with a question."""
    return [prompt_of(tokenizer, length, QUESTION if index % 2 else None, start=index * 401) for index in range(count)]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(values) / math.sqrt(len(values))
