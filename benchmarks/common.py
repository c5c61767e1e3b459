"""What the quality benchmarks have in common: prompts to measure on, the error of a mean over them, result files."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import stdev
from typing import Any

from stageprune.evaluate.text import held_out_prompts
from stageprune.files import write_file

__all__ = ["held_out_prompts", "standard_error", "write_json"]


def standard_error(values: Sequence[float]) -> float:
    """Of their mean."""
    return stdev(values) / math.sqrt(len(values))


def write_json(path: Path, data: Any) -> None:
    """A result file, in one step."""
    write_file(path, json.dumps(data, indent=1, ensure_ascii=False) + "\n")
