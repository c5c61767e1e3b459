"""What is taken from a result file, in terms that all files share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, Literal, TypeAlias

from stageprune.evaluate.report.document import Section

Stage: TypeAlias = Literal["prompt", "generation"]


@dataclass(frozen=True)
class Interval:
    """A value and how sure it is.

    Attributes:
        value: the estimate.
        lower, upper: of a confidence interval, of the middle half, or one standard error away; the value itself where
            nothing is known.
    """

    value: float
    lower: float
    upper: float

    @classmethod
    def of(cls, value: Any, lower: Any = None, upper: Any = None) -> Interval:
        """Of numbers in a file.

        Raises:
            TypeError, ValueError: if one is no finite number.
        """
        middle = number(value)
        return cls(middle, middle if lower is None else number(lower), middle if upper is None else number(upper))

    @classmethod
    def with_error(cls, value: Any, error: Any) -> Interval:
        """One standard error to both sides; `error` may be None."""
        width = 0.0 if error is None else number(error)
        return cls.of(value, number(value) - width, number(value) + width)

    @classmethod
    def of_mean(cls, values: Sequence[Any]) -> Interval:
        """A mean over prompts, and its standard error."""
        numbers = [number(value) for value in values]
        error = stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        return cls.with_error(fmean(numbers), error)

    @classmethod
    def of_spread(cls, spread: Any) -> Interval:
        """A median and the middle half, as `Spread.to_dict` writes them."""
        return cls.of(spread["median"], spread["lower"], spread["upper"])

    @property
    def error(self) -> float:
        """Half the width."""
        return (self.upper - self.lower) / 2


@dataclass(frozen=True)
class Point:
    """A setting's quality and speed.

    Attributes:
        label: the setting, in a few words.
        series: the method, which the plot gives a colour.
        stage: whose time the speed-up is of.
        speedup: over the dense model.
        measure: what speed-up this is, such as "ideal speed-up of the prompt"; others are not compared.
        kl: KL divergence from the dense model per token, in nats; None if not measured.
        agreement: share of tokens whose likeliest prediction is the dense model's.
        text: what quality was measured on; points of other text are not compared.
    """

    label: str
    series: str
    stage: Stage
    speedup: Interval
    measure: str
    kl: Interval | None
    agreement: Interval | None
    text: str


@dataclass(frozen=True)
class PromptSpeed:
    """A measured speed-up of the time to the first token.

    Attributes:
        model, prompt_length, batch: where it was measured.
        skipped_layers: the last ones.
        speedup: the median and the middle half.
    """

    model: str
    prompt_length: int
    batch: int
    skipped_layers: int
    speedup: Interval


@dataclass(frozen=True)
class Made:
    """How a file came about.

    Attributes:
        command: that wrote it; None if the file does not say.
        model: its name, and its type of numbers.
        system: hardware and versions.
    """

    command: str | None
    model: str
    system: dict[str, Any]


@dataclass(frozen=True)
class Part:
    """What one file contributes.

    Attributes:
        name: of the file.
        made: how it came about.
        sections: its own tables and figures.
        points: for the plot of quality against speed.
        speeds: that tables of other files can use.
    """

    name: str
    made: Made
    sections: Sequence[Section]
    points: Sequence[Point] = ()
    speeds: Sequence[PromptSpeed] = ()


def number(value: Any) -> float:
    """A finite number of a file.

    Raises:
        TypeError, ValueError: if it is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r:.60} is no number")
    if not math.isfinite(value):
        raise ValueError("a number is not finite")
    return value


def made(data: Any, settings: Any = None) -> Made:
    """From a file's own fields, or those of its settings."""
    settings = data if settings is None else settings
    model = data.get("model", settings.get("model", ""))
    if isinstance(model, dict):
        model, kind = model["name"], model.get("dtype", "")
    else:
        kind = data.get("dtype", settings.get("dtype", ""))
    names = ("stageprune", "torch", "transformers")
    system = settings.get("system") or settings.get("versions") or {n: settings[n] for n in names if n in settings}
    command = settings.get("command")
    shown = ", ".join(str(part) for part in (model, kind) if part)
    return Made(None if command is None else str(command), shown, dict(system))
