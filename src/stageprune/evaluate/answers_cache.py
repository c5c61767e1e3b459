"""The dense model's answers of earlier evaluations, in the user's cache directory.

There is one file for each model and way of generating. It is a convenience: what cannot be read or written is computed
again, and the result is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stageprune.errors import ResultFileError, StagePruneError
from stageprune.files import OutputFileError, remove_leftovers
from stageprune.records import digest, read_record, write_record
from stageprune.user_cache import cache_directory

KIND, VERSION = "stageprune-answers", 1


class AnswersCache:
    """Answers by prompt.

    Args:
        key: of the model and everything else that an answer depends on, but the prompt; JSON-ready.
        folder: where the file is; None for the user's cache directory.
    """

    def __init__(self, key: Any, folder: Path | None = None) -> None:
        self._path: Path | None = None
        with suppress(StagePruneError):  # no home
            self._path = (folder or cache_directory() / "answers") / f"{digest(key)[:32]}.json"
        self._answers = dict(self._read())

    def answers(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Of the first prompts, up to one that has none."""
        found: list[tuple[int, ...]] = []
        for prompt in prompts:
            answer = self._answers.get(_name(prompt))
            if answer is None:
                break
            found.append(answer)
        return tuple(found)

    def add(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> None:
        """Keep some answers for later runs."""
        new = {_name(prompt): tuple(answer) for prompt, answer in zip(prompts, answers, strict=True)}
        if self._path is None or new.items() <= self._answers.items():
            return
        self._answers |= new
        content = {name: list(answer) for name, answer in self._answers.items()}
        with suppress(OSError, OutputFileError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._path)
            write_record(self._path, KIND, VERSION, {"answers": content})

    def _read(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        if self._path is None:
            return
        with suppress(ResultFileError, KeyError, TypeError, ValueError, AttributeError):
            for name, answer in read_record(self._path, KIND, VERSION)["answers"].items():
                yield name, tuple(map(int, answer))


def _name(prompt: Sequence[int]) -> str:
    return digest(list(prompt))
