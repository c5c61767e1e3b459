"""Reading the data that a user names: files and data sets of the hub, each error naming its place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stageprune.errors import DataError

SUFFIXES = (".jsonl", ".parquet", ".txt")


@dataclass(frozen=True)
class Rows:
    """The rows of a data set.

    Attributes:
        rows: one sample each.
        place: what messages call a row, from its index.
        local: whether reading all rows is cheap.
    """

    rows: Sequence[Any]
    place: Callable[[int], str]
    local: bool


def is_file(data: str) -> bool:
    """Whether `data` means a file, rather than a data set of the hub."""
    return data.lower().endswith(SUFFIXES) or os.path.exists(os.path.expanduser(data))


def open_data(data: str) -> Rows | str:
    """The rows of a data set, or the whole text of a text file.

    Raises:
        DataError: if it cannot be read.
    """
    if not is_file(data):
        return _hub_rows(data)
    path = Path(os.path.expanduser(data))
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        kind = "a folder" if path.is_dir() else "a file"
        raise DataError(f"{data!r} is {kind}; calibration data is a file that ends in {', '.join(SUFFIXES)}")
    if suffix == ".parquet":
        return _parquet_rows(path)
    text = _text(path)
    return text if suffix == ".txt" else _json_rows(path, text)


def _text(path: Path) -> str:
    name = repr(str(path))
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8 text: byte {error.start} is wrong") from error
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise DataError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from error
    if not text.strip():
        raise DataError(f"{name} is empty")
    if "\0" in text:
        raise DataError(f"{name} is not text: it holds a zero byte")
    return text


def _json_rows(path: Path, text: str) -> Rows:
    rows, numbers = [], []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            raise DataError(f"{str(path)!r}, line {number}: no JSON ({error})") from error
        numbers.append(number)
    return Rows(rows, lambda index: f"{str(path)!r}, line {numbers[index]}", local=True)


def _parquet_rows(path: Path) -> Rows:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise DataError(f"{str(path)!r} needs pyarrow to be read; run: pip install 'stageprune[data]'") from error
    try:
        rows = parquet.read_table(path).to_pylist()
    except Exception as error:
        raise DataError(f"cannot read {str(path)!r}: {_summary(error)}") from error
    if not rows:
        raise DataError(f"{str(path)!r} has no rows")
    return Rows(rows, lambda index: f"{str(path)!r}, row {index + 1}", local=True)


def _hub_rows(name: str) -> Rows:
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            f"there is no file {name!r}, and a data set of the hub needs the package datasets; "
            "run: pip install 'stageprune[data]'"
        ) from error
    try:
        rows = datasets.load_dataset(name, split="train")
    except Exception as error:
        raise DataError(
            f"cannot load the data set {name!r} (split 'train'): {_summary(error)} (no local file has this name, so it "
            "was looked up on the hub)"
        ) from error
    if not len(rows):
        raise DataError(f"the data set {name!r} has no rows")
    return Rows(rows, lambda index: f"{name!r}, row {index + 1}", local=False)


def _summary(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
