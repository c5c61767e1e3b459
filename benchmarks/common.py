"""What the quality benchmarks have in common: the prompts that they measure on, and the error of a mean over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

from stageprune.evaluate.text import held_out_prompts

__all__ = ["held_out_prompts", "standard_error"]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(values) / math.sqrt(len(values))
