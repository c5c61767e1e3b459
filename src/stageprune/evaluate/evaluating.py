"""Measuring settings example by example, so that an interrupted evaluation can go on.

The dense model answers every prompt first. Its log-probabilities on the way through the answers are not kept on the
disk: they are computed again for what is left to measure, for as many examples at a time as fit into `CHUNK_BYTES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any, Self

from stageprune.errors import NumericsError
from stageprune.evaluate.evaluation import Ideal, Row, Scores
from stageprune.evaluate.examples import Example
from stageprune.evaluate.quality import Case, case_of
from stageprune.evaluate.score import dense_score, greedy_answer, matched_tokens, score
from stageprune.evaluate.setting import DENSE, Setting
from stageprune.pruning import Handle

CHUNK_BYTES = 1 << 30
"""Of the dense model's log-probabilities, held at once."""


@dataclass(frozen=True)
class Progress:
    """How far the measurement is.

    Attributes:
        answers: of the dense model to the first prompts, as token ids.
        scores: for each setting, of the first examples.
        ideal: for each setting, the speed-ups of each bucket; empty before the first score.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    scores: tuple[tuple[Scores, ...], ...] = ()
    ideal: tuple[dict[int, Ideal], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "answers": [list(answer) for answer in self.answers],
            "scores": [[scores.to_dict() for scores in setting] for setting in self.scores],
            "ideal": [{str(bucket): vars(ideal) for bucket, ideal in buckets.items()} for buckets in self.ideal],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        answers = tuple(tuple(map(int, answer)) for answer in data["answers"])
        scores = tuple(tuple(map(Scores.from_dict, setting)) for setting in data["scores"])
        ideal = tuple({int(bucket): Ideal(**one) for bucket, one in buckets.items()} for buckets in data["ideal"])
        return cls(answers, scores, ideal)

    @property
    def steps(self) -> int:
        """How many answers and scores are done."""
        return len(self.answers) + sum(map(len, self.scores))


def steps_of(examples: Sequence[Example], settings: Sequence[Setting]) -> int:
    """How often `evaluate` calls `on_step` from the beginning."""
    return len(examples) * (1 + len(settings))


def evaluate(
    model: Any,
    examples: Sequence[Example],
    settings: Sequence[Setting],
    *,
    answer_tokens: int,
    done: Progress = Progress(),
    on_step: Callable[[Progress], object] = lambda progress: None,
) -> tuple[Row, ...]:
    """Measure how close each setting stays to the dense model, on its greedy answers and on the given references.

    Args:
        model: not pruned; it is dense again afterwards.
        examples: prompts, and references where there are any.
        settings: to measure.
        answer_tokens: after which the dense model's answers are cut off.
        done: of an earlier run with the same arguments.
        on_step: called with all that is done after each answer of the dense model and after each example of a setting.

    Returns:
        The rows of an `Evaluation`: the dense model's, and one for each setting.

    Raises:
        NumericsError: if a result is not finite.
        SettingError, UnsupportedModelError, ResultFileError: if a setting cannot be applied to the model.
    """
    measurement = _Measurement(model, examples, settings, done, on_step)
    return measurement.run(answer_tokens)


class _Measurement:
    def __init__(
        self,
        model: Any,
        examples: Sequence[Example],
        settings: Sequence[Setting],
        done: Progress,
        on_step: Callable[[Progress], object],
    ) -> None:
        self._model, self._examples, self._settings = model, examples, settings
        self._on_step = on_step
        self._answers = list(done.answers)
        self._scores = [list(scores) for scores in done.scores] or [[] for _ in settings]
        self._ideal = [dict(ideal) for ideal in done.ideal] or [{} for _ in settings]

    def run(self, answer_tokens: int) -> tuple[Row, ...]:
        for setting in self._settings:
            if setting.calibration is None:  # at once what cannot be applied, not after an hour
                setting.attach(self._model).remove()
        for example in self._examples[len(self._answers) :]:
            self._answers.append(tuple(greedy_answer(self._model, example.prompt, answer_tokens)))
            self._report()
        dense: list[Scores] = []
        for chunk in self._chunks():
            cases = {index: self._cases(index) for index in chunk}
            dense += [_dense_scores(*cases[index]) for index in chunk]
            for place, setting in enumerate(self._settings):
                left = [index for index in chunk if index >= len(self._scores[place])]
                if left:
                    with setting.attach(self._model) as handle:
                        self._measure(handle, place, [(index, *cases[index]) for index in left])
        buckets = {bucket: Ideal(length, 1.0, 1.0) for bucket, length in self._lengths().items()}
        return (
            Row(DENSE.to_dict(), tuple(dense), buckets),
            *(
                Row(setting.to_dict(), tuple(scores), ideal)
                for setting, scores, ideal in zip(self._settings, self._scores, self._ideal, strict=True)
            ),
        )

    def _measure(self, handle: Handle, place: int, cases: Sequence[tuple[int, Case, Case | None]]) -> None:
        """The next examples of one setting."""
        if not self._ideal[place]:
            for bucket, length in self._lengths().items():
                report = handle.report(length)
                self._ideal[place][bucket] = Ideal(length, report.ideal_speedup, report.ideal_decode_speedup)
        for index, answer, reference in cases:
            matched = matched_tokens(self._model, self._examples[index].prompt, self._answers[index])
            result = Scores(
                replace(score(handle, answer), matched=matched),
                None if reference is None else score(handle, reference),
            )
            for part in (result.answers, result.references):
                if part is not None and not (math.isfinite(part.kl) and math.isfinite(part.nll)):
                    raise NumericsError(
                        f"the predictions with {self._settings[place].name!r} are not finite: an overflow, usual with "
                        "float16; load the model in bfloat16 or float32"
                    )
            self._scores[place].append(result)
            self._report()

    def _chunks(self) -> Iterator[list[int]]:
        """Examples whose log-probabilities fit into memory together."""
        vocabulary = int(self._model.config.get_text_config().vocab_size)
        chunk: list[int] = []
        size = 0
        for index, example in enumerate(self._examples):
            own = 4 * vocabulary * (len(self._answers[index]) + len(example.reference))
            if chunk and size + own > CHUNK_BYTES:
                yield chunk
                chunk, size = [], 0
            chunk.append(index)
            size += own
        yield chunk

    def _cases(self, index: int) -> tuple[Case, Case | None]:
        example = self._examples[index]
        answer = case_of(self._model, example.prompt, self._answers[index])
        return answer, case_of(self._model, example.prompt, example.reference) if example.reference else None

    def _lengths(self) -> dict[int, int]:
        """The mean prompt length of each bucket."""
        buckets = sorted({example.bucket for example in self._examples})
        return {
            bucket: round(mean(len(example.prompt) for example in self._examples if example.bucket == bucket))
            for bucket in buckets
        }

    def _report(self) -> None:
        self._on_step(
            Progress(tuple(self._answers), tuple(map(tuple, self._scores)), tuple(dict(ideal) for ideal in self._ideal))
        )


def _dense_scores(answer: Case, reference: Case | None) -> Scores:
    matched = answer.answer.shape[1]
    return Scores(dense_score(answer, matched), None if reference is None else dense_score(reference, None))
