"""Writing result files: whole or not at all."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path

from stageprune.errors import StagePruneError


class OutputFileError(StagePruneError):
    """A result cannot be written to the file the user named."""


def check_writable(path: Path) -> None:
    """Find out before a long measurement, not after it, that its result cannot be written.

    Raises:
        OutputFileError: if the path is a folder, or its folder is missing or not writable.
    """
    try:
        if path.is_dir():
            raise OutputFileError(f"cannot write {str(path)!r}: it is a folder")
        if not path.parent.is_dir():
            raise OutputFileError(f"cannot write {str(path)!r}: there is no folder {str(path.parent)!r}")
        if not os.access(path.parent, os.W_OK):
            raise OutputFileError(f"cannot write {str(path)!r}: the folder is not writable")
        os.lstat(path)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise OutputFileError(f"cannot write {str(path)!r}: {getattr(error, 'strerror', None) or error}") from error


def write_file(path: Path, content: str | bytes) -> None:
    """Write a file (text as UTF-8) under a temporary name and rename it, so that no half-written file is ever seen.

    Raises:
        OutputFileError: if that fails; an earlier file is then still there, unchanged.
    """
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=_prefix(path), delete=False) as file:
            temporary = file.name
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, path.stat().st_mode & 0o777 if path.exists() else default_mode())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None and os.path.exists(temporary):
            os.unlink(temporary)
        raise OutputFileError(f"cannot write {str(path)!r}: {error.strerror}") from error


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of earlier processes that were killed while they wrote `path`."""
    pattern = re.compile(rf"{re.escape(_prefix(path))}[a-z0-9_]{{8}}")
    for file in path.parent.iterdir():
        if pattern.fullmatch(file.name):
            file.unlink(missing_ok=True)


def _prefix(path: Path) -> str:
    return f".{path.name[:40]}."


def default_mode() -> int:
    """The permissions of a new file in this process; reading its mask means setting it."""
    mask = os.umask(0o022)
    os.umask(mask)
    return 0o666 & ~mask
