"""Whether a second run of a benchmark is slower than the first: two files of `stageprune bench --json`.

A measure counts as worse if it is so by more than a threshold, and the middle halves of both runs lie apart; noise
alone seldom does both.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stageprune.errors import ResultFileError

_MEASURES = (
    ("first token", ("prefill", "pruned_s"), False),
    ("speed-up of the first token", ("prefill", "speedup"), True),
    ("generation", ("decode", "pruned_tokens_per_s"), True),
    ("speed-up of generation", ("decode", "speedup"), True),
    ("FFN", ("pruned_s",), False),
    ("speed-up of the FFN", ("speedup",), True),
)
"""Name, where it is in a cell, and whether more is better."""

_KEYS = ("methods", "method", "backends", "backend", "batch", "prompt_length", "hidden_size", "intermediate_size")


@dataclass(frozen=True)
class Change:
    """One measure of one cell.

    Attributes:
        cell: what was measured, in words.
        measure: its name.
        old, new: medians.
        factor: new over old, or old over new where less is better: below 1 is worse.
        apart: whether the middle halves of the two do not touch.
        verdict: `"worse"`, `"better"` or `"same"`.
    """

    cell: str
    measure: str
    old: float
    new: float
    factor: float
    apart: bool
    verdict: str


@dataclass(frozen=True)
class Regression:
    """All of them.

    Attributes:
        changes: of the cells that both files have.
        only_old, only_new: cells that one of them has.
        same_system: whether hardware and versions are the same in both.
    """

    changes: tuple[Change, ...]
    only_old: tuple[str, ...]
    only_new: tuple[str, ...]
    same_system: bool

    @property
    def worse(self) -> tuple[Change, ...]:
        """What got worse."""
        return tuple(change for change in self.changes if change.verdict == "worse")

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "worse": len(self.worse)}


def compare_files(old: str | Path, new: str | Path, threshold: float) -> Regression:
    """Compare two result files.

    Args:
        old: the first run.
        new: the second.
        threshold: by which share a median may be worse, such as 0.05.

    Raises:
        ResultFileError: if a file is missing, damaged, or not of `stageprune bench`; or if they have no cell in common.
    """
    before, after = _read(old), _read(new)
    cells, others = ({_key(cell): cell for cell in data["cells"]} for data in (before, after))
    common = [key for key in cells if key in others]
    if not common:
        raise ResultFileError(f"{str(old)!r} and {str(new)!r} measured nothing in common: settings, batches or lengths")
    try:
        changes = tuple(
            change for key in common for change in _changes(_words(cells[key]), cells[key], others[key], threshold)
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ResultFileError(f"{str(old)!r} or {str(new)!r} is damaged: {error!r}") from error
    return Regression(
        changes,
        tuple(_words(cell) for key, cell in cells.items() if key not in others),
        tuple(_words(cell) for key, cell in others.items() if key not in cells),
        before.get("system") == after.get("system"),
    )


def _changes(words: str, old: Any, new: Any, threshold: float) -> Iterator[Change]:
    for name, path, more_is_better in _MEASURES:
        first, second = _at(old, path), _at(new, path)
        if first is None or second is None:
            continue
        a, b = float(first["median"]), float(second["median"])
        factor = b / a if more_is_better else a / b
        apart = first["upper"] < second["lower"] or second["upper"] < first["lower"]
        verdict = "same"
        if apart and abs(factor - 1) > threshold:
            verdict = "better" if factor > 1 else "worse"
        yield Change(words, name, a, b, factor, apart, verdict)


def _at(cell: Any, path: Sequence[str]) -> Any:
    for name in path:
        cell = cell.get(name) if isinstance(cell, dict) else None
    return cell


def _read(path: str | Path) -> Any:
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = data["cells"]
        if not isinstance(cells, list) or not all(isinstance(cell, dict) for cell in cells):
            raise TypeError("its cells are no list of objects")
    except OSError as error:
        raise ResultFileError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise ResultFileError(f"{str(path)!r} is no file of stageprune bench --json: {error}") from error
    return data


def _key(cell: dict[str, Any]) -> str:
    return json.dumps({name: cell.get(name) for name in _KEYS}, sort_keys=True)


def _words(cell: dict[str, Any]) -> str:
    """Such as `layers 0.333, batch 1, 512 tokens`."""
    methods = cell.get("methods") or ([cell["method"]] if cell.get("method") else [])
    parts = [_method(method) for method in methods]
    if cell.get("hidden_size"):
        parts.append(f"{cell['hidden_size']} x {cell['intermediate_size']}")
    parts += [] if not cell.get("backends") else ["/".join(cell["backends"])]
    parts += [] if cell.get("batch") is None else [f"batch {cell['batch']}"]
    parts += [] if cell.get("prompt_length") is None else [f"{cell['prompt_length']:,} tokens"]
    return ", ".join(parts)


def _method(method: dict[str, Any]) -> str:
    ratio = method.get("mlp_ratio") or method.get("ratio")
    layers = method.get("layers")
    what = layers if isinstance(layers, list) else f"{ratio:.3g}" if isinstance(ratio, (int, float)) else "?"
    return f"{'layers' if 'layers' in method else 'channels'} {what}"
