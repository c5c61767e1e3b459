"""Measuring a plan's candidates one after the other, so that an interrupted run can go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from stageprune.errors import NumericsError
from stageprune.evaluate.plan import Point
from stageprune.evaluate.quality import case_of, closeness, dense_answer
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import find_decoder
from stageprune.methods import PrefillOnlyPruning
from stageprune.pruning import prune


@dataclass(frozen=True)
class Progress:
    """How far the measurement is.

    Attributes:
        answers: of the dense model to the first prompts, as token ids.
        points: the first candidates, measured.
    """

    answers: tuple[tuple[int, ...], ...] = ()
    points: tuple[Point, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"answers": [list(answer) for answer in self.answers], "points": [asdict(p) for p in self.points]}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        answers = tuple(tuple(map(int, answer)) for answer in data["answers"])
        return cls(answers, tuple(map(Point.from_dict, data["points"])))

    @property
    def steps(self) -> int:
        """How many answers and candidates are done."""
        return len(self.answers) + len(self.points)


def measure(
    model: Any,
    prompts: Sequence[Sequence[int]],
    candidates: Mapping[tuple[int, ...], tuple[str, ...]],
    *,
    answer_tokens: int,
    speed_tokens: int,
    done: Progress = Progress(),
    on_step: Callable[[Progress], object] = lambda progress: None,
) -> tuple[Point, ...]:
    """Measure how close each candidate stays to the dense model on the dense model's own greedy answers.

    Args:
        model: not pruned; it is dense again afterwards.
        prompts: token ids, two or more each.
        candidates: layers to skip, and the rules that say so.
        answer_tokens: length of the answers.
        speed_tokens: length of the prompt that operations are counted for.
        done: of an earlier run with the same arguments.
        on_step: called with all that is done after each answer of the dense model and after each candidate.

    Raises:
        NumericsError: if a result is not finite.
        UnsupportedModelError: if the model cannot be pruned.
    """
    decoder = find_decoder(model)
    answers, points = done.answers, done.points
    for prompt in prompts[len(answers) :]:
        answers += (tuple(dense_answer(model, prompt, answer_tokens)),)
        on_step(Progress(answers, points))
    remaining = list(candidates.items())[len(points) :]
    if not remaining:
        return points
    cases = [case_of(model, prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)]
    for layers, rules in remaining:
        with prune(model, PrefillOnlyPruning(layers=layers)) as handle:
            quality = closeness(handle, cases)
        if not math.isfinite(quality.kl):
            raise NumericsError(
                f"the predictions without layers {', '.join(map(str, layers))} are not finite: an overflow, usual with "
                "float16; load the model in bfloat16 or float32"
            )
        points += (Point.of(layers, rules, prompt_flops(decoder, speed_tokens, layers), quality),)
        on_step(Progress(answers, points))
    return points
