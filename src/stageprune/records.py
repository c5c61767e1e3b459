"""Result files: JSON with a kind, a version and a checksum, written whole and read back whole or not at all."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from stageprune.errors import ResultFileError
from stageprune.files import write_file


def write_record(path: Path, kind: str, version: int, content: dict[str, Any]) -> None:
    """Write `content` (JSON-ready, without infinities) to a file that `read_record` reads.

    Raises:
        OutputFileError: if the file cannot be written; an earlier one is then unchanged.
    """
    write_file(path, json.dumps(sealed(kind, version, content), indent=2, allow_nan=False) + "\n")


def sealed(kind: str, version: int, content: dict[str, Any]) -> dict[str, Any]:
    """The content with its kind and version in front, and its checksum behind."""
    record = {"kind": kind, "version": version, **content}
    return {**record, "checksum": digest(record)}


def read_record(path: Path, kind: str, version: int) -> dict[str, Any]:
    """The content of a file that `write_record` wrote.

    Raises:
        ResultFileError: if it cannot be read, is damaged, or is of another kind or version.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        # ValueError: no JSON, no UTF-8, or a name that no file can have.
        reason = error.strerror if isinstance(error, OSError) else f"it is damaged or no JSON ({error})"
        raise ResultFileError(f"cannot read {str(path)!r}: {reason}") from error
    return check_record(record, path, kind, version)


def check_record(record: Any, path: Path, kind: str, version: int) -> dict[str, Any]:
    """The content of what `sealed` gave and a file held.

    Raises:
        ResultFileError: if it is damaged, or of another kind or version.
    """
    name = repr(str(path))
    if not isinstance(record, dict) or record.get("kind") != kind:
        found = record.get("kind") if isinstance(record, dict) else type(record).__name__
        raise ResultFileError(f"{name} is no {kind} file (its kind is {found!r})")
    if record.get("version") != version:
        raise ResultFileError(
            f"{name} is a {kind} file of version {record.get('version')!r}; this stageprune reads version {version}"
        )
    checksum = record.pop("checksum", None)
    if checksum != digest(record):
        raise ResultFileError(f"{name} is damaged: its content does not have the checksum that it was written with")
    del record["kind"], record["version"]
    return record


def digest(data: Any) -> str:
    """A checksum of JSON-ready data that survives writing and reading it."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
