"""What a long analysis has done so far, beside its result, so that it can go on after an interruption."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stageprune.errors import ResultFileError
from stageprune.prefill.importance import SampleScore
from stageprune.records import digest, read_record, write_record

KIND, VERSION = "stageprune-importance-partial", 1


class Checkpoint:
    """The file `OUTPUT.partial`.

    Args:
        output: where the result will be.
        identity: model and settings, as groups of JSON-ready values; scores of another identity are refused.
    """

    def __init__(self, output: Path, identity: dict[str, dict[str, Any]]) -> None:
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
            if data["identity"] != digest(self._identity):
                raise ResultFileError(
                    f"{str(self.path)!r} was begun with other settings ({self._differences(data)}); {remedy}"
                )
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

    def _differences(self, data: dict[str, Any]) -> str:
        found = []
        for group, ours in self._identity.items():
            theirs = data.get(group, {})
            names = [name for name in {**ours, **theirs} if theirs.get(name) != ours.get(name)]
            found += [f"{group}.{name}: {theirs.get(name)!r} there, {ours.get(name)!r} now" for name in names]
        return "; ".join(found)
