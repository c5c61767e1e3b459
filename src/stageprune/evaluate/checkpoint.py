"""What a long measurement has done so far, beside its result, so that it can go on after an interruption."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

from stageprune.errors import ResultFileError
from stageprune.files import remove_leftovers
from stageprune.records import digest, read_record, write_record

State = TypeVar("State")

Identity: TypeAlias = dict[str, dict[str, Any]]
"""Model and settings, as groups of JSON-ready values."""


class Checkpoint(Generic[State]):
    """The file `OUTPUT.partial`.

    Args:
        output: where the result will be.
        kind: of the file, such as `"stageprune-importance-partial"`.
        version: of what `save` is given.
        identity: model and settings; a file of another identity is refused.
        read: from what `save` was given to the state; raises KeyError, TypeError or ValueError where that is wrong.
    """

    def __init__(
        self, output: Path, kind: str, version: int, identity: Identity, read: Callable[[dict[str, Any]], State]
    ) -> None:
        self.path = output.with_name(f"{output.name}.partial")
        self._output = output
        self._kind, self._version = kind, version
        self._identity = identity
        self._read = read

    def load(self) -> State | None:
        """The state so far; None if there is no file. What a killed process left half-written is removed.

        Raises:
            ResultFileError: if the file is damaged, or of another model or other settings; says which.
        """
        for path in (self.path, self._output):
            remove_leftovers(path)
        if not self.path.exists():
            return None
        remedy = f"delete {str(self.path)!r} to begin anew, or name another --output"
        try:
            data = read_record(self.path, self._kind, self._version)
            check_same(self._identity, data, f"{str(self.path)!r} was begun with other settings", remedy)
            return self._read(data)
        except (KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{str(self.path)!r} is no complete {self._kind} file: {error}; {remedy}") from error

    def save(self, state: dict[str, Any]) -> None:
        """Replace the file by one with this JSON-ready state, in one step.

        Raises:
            OutputFileError: if that fails.
        """
        write_record(
            self.path, self._kind, self._version, {"identity": digest(self._identity), **self._identity, **state}
        )

    def remove(self) -> None:
        """The result is written: nothing to go on with."""
        self.path.unlink(missing_ok=True)


def check_same(ours: Identity, theirs: dict[str, Any], problem: str, remedy: str) -> None:
    """Raise unless a file was begun with these settings.

    Args:
        ours: settings of now.
        theirs: content of the file, `ours` among it if it goes on with them, and under `"identity"` their digest.
        problem: with which the message begins.
        remedy: with which it ends.

    Raises:
        ResultFileError: says what differs.
    """
    if theirs["identity"] == digest(ours):
        return
    found = []
    for group, values in ours.items():
        others = theirs.get(group, {})
        names = [name for name in {**values, **others} if others.get(name) != values.get(name)]
        found += [f"{group}.{name}: {others.get(name)!r} there, {values.get(name)!r} now" for name in names]
    raise ResultFileError(f"{problem} ({'; '.join(found)}); {remedy}")
