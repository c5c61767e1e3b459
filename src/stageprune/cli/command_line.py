"""The command that is running, as its result file records it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_running: list[Sequence[str]] = []


@contextmanager
def running(arguments: Sequence[str] | None) -> Iterator[None]:
    """Inside, `command_line()` gives these arguments; None: the process's own."""
    _running.append(sys.argv[1:] if arguments is None else arguments)
    try:
        yield
    finally:
        _running.pop()


def command_line() -> str | None:
    """Such as `stageprune bench --lengths 32,512`; None where none is running.

    Of files that are named from the root or the user's folder on, only the names are kept: the folders are the user's
    own business.
    """
    if not _running:
        return None
    return shlex.join(["stageprune", *map(_without_folders, _running[-1])])


def _without_folders(argument: str) -> str:
    option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    return f"{option}{equals}{path.name}" if path.is_absolute() or value.startswith(("~", "..")) else argument
