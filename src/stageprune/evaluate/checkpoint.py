"""What a long analysis has done so far, beside its result, so that it can go on after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from stageprune.errors import ResultFileError
from stageprune.prefill.importance import SampleScore
from stageprune.records import digest, read_record, write_record

KIND, VERSION = "stageprune-importance-partial", 1

Identity: TypeAlias = dict[str, dict[str, Any]]
"""Model and settings, as groups of JSON-ready values."""


class Checkpoint:
    """The file `OUTPUT.partial`.

    Args:
        output: where the result will be.
        identity: model and settings; scores of another identity are refused.
    """

    def __init__(self, output: Path, identity: Identity) -> None:
        self.path = output.with_name(f"{output.name}.partial")
        self._identity = identity

    def load(self) -> tuple[SampleScore, ...]:
        """The scores so far; none if there is no file.

        Raises:
            ResultFileError: if the file is damaged, or of another model or other settings; says which.
        """
        if not self.path.exists():
            return ()
        remedy = f"delete {str(self.path)!r} to begin anew, or name another --output"
        try:
            data = read_record(self.path, KIND, VERSION)
            check_same(self._identity, data, f"{str(self.path)!r} was begun with other settings", remedy)
            return tuple(SampleScore.from_dict(sample) for sample in data["samples"])
        except (KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{str(self.path)!r} is no complete {KIND} file: {error}; {remedy}") from error

    def save(self, scores: Sequence[SampleScore]) -> None:
        """Replace the file by one with these scores, in one step.

        Raises:
            OutputFileError: if that fails.
        """
        samples = [score.to_dict() for score in scores]
        write_record(
            self.path, KIND, VERSION, {"identity": digest(self._identity), **self._identity, "samples": samples}
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
