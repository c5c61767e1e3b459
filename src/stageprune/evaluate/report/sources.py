"""Reading a result file of whatever kind it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from stageprune.errors import ResultFileError
from stageprune.evaluate.report import bench, closeness, evaluation, importance, overlap, plan
from stageprune.evaluate.report.content import Part
from stageprune.evaluate.report.figures import Drawing
from stageprune.prefill.importance import KIND as IMPORTANCE
from stageprune.prefill.importance import Importance
from stageprune.settings_file import KIND as SETTINGS

KINDS = "stageprune bench, analyze, plan, eval or compare"


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        ResultFileError: if it cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: no JSON, no UTF-8, or a name that no file can have.
        reason = error.strerror if isinstance(error, OSError) else f"it is damaged or no JSON ({error})"
        raise ResultFileError(f"cannot read {str(path)!r}: {reason}") from error


def read_part(path: Path, drawing: Drawing) -> Part:
    """What a file that one of the commands wrote contributes to a report.

    Raises:
        ResultFileError: if it cannot be read, is damaged or incomplete, or no report shows its kind; names the file.
    """
    data = read_json(path)
    reader = _reader(data, path, drawing)
    if reader is None:
        raise ResultFileError(f"{str(path)!r} is no result of {KINDS}")
    try:
        return reader()
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ResultFileError):
            raise
        raise ResultFileError(f"{str(path)!r} is no complete result file: {type(error).__name__}: {error}") from error


def is_plan(data: Any) -> bool:
    """Whether a file's content is that of a plan."""
    return isinstance(data, dict) and data.get("kind") == SETTINGS


def _reader(data: Any, path: Path, drawing: Drawing) -> Callable[[], Part] | None:
    if not isinstance(data, dict):
        return None
    name = path.name
    if is_plan(data):
        return lambda: plan.part(path)
    if data.get("kind") == evaluation.KIND:
        return lambda: evaluation.part(path)
    if data.get("kind") == IMPORTANCE:
        return lambda: importance.part(name, Importance.load(path).to_dict(), drawing)
    # Files of earlier versions, and of the benchmarks, do not say their kind.
    for fields, reader in (
        ({"cells", "model", "system"}, lambda: bench.part(name, data)),
        ({"report", "prefill", "teacher_forced_agreement"}, lambda: overlap.part(name, data, drawing)),
        ({"layers", "drift", "settings"}, lambda: importance.part(name, data, drawing)),
        ({"variants", "settings"}, lambda: closeness.ablation(name, data)),
    ):
        if fields <= data.keys():
            return reader
    if {"run", "points"} <= data.keys():
        has_kinds = isinstance(data["points"], dict) and all("kinds" in row for row in data["points"].values())
        return lambda: (closeness.fitted if has_kinds else closeness.channels)(name, data)
    return None
