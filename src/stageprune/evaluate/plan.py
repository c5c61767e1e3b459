"""Which layers to skip for the largest speed-up at which measured quality stays within a bound.

Every candidate is measured: quality need not fall steadily with the number of skipped layers, so no candidate is ruled
out by another. What the plan chooses is therefore the optimum among its candidates, as measured.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import stdev
from typing import Any, Self

from stageprune.errors import ResultFileError, SettingError
from stageprune.evaluate.quality import Quality
from stageprune.methods import PrefillOnlyPruning
from stageprune.settings_file import KIND, SettingsFile


@dataclass(frozen=True)
class Bound:
    """How far the pruned model may be from the dense one; at least one of both.

    Attributes:
        max_kl: mean KL divergence per answer token, in nats, at most.
        min_agreement: share of answer tokens whose likeliest prediction is the same, at least.

    Raises:
        SettingError: if there is no bound, or one of the wrong type or value.
    """

    max_kl: float | None = None
    min_agreement: float | None = None

    def __post_init__(self) -> None:
        if self.max_kl is None and self.min_agreement is None:
            raise SettingError("a plan needs a bound: max_kl, min_agreement, or both")
        for name, most in (("max_kl", math.inf), ("min_agreement", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= most:
                raise SettingError(
                    f"{name} must be a number of at least 0{' and at most 1' * (most == 1)}, got {value!r}"
                )

    def holds(self, point: Point) -> bool:
        """Whether a measurement is within the bound."""
        return (self.max_kl is None or point.kl <= self.max_kl) and (
            self.min_agreement is None or point.agreement >= self.min_agreement
        )


@dataclass(frozen=True)
class Point:
    """One candidate, measured.

    Attributes:
        layers: that the prompt skips; none: the dense model.
        rules: that choose these layers for some ratio: `"last"`, `"contiguous"`, `"free"`.
        flops: up to the first token.
        kl: mean KL divergence from the dense model per answer token, in nats.
        kl_error: its standard error over prompts; None for one prompt.
        agreement: share of answer tokens whose likeliest prediction is the same.
        agreement_error: its standard error over prompts; None for one prompt.
    """

    layers: tuple[int, ...]
    rules: tuple[str, ...]
    flops: int
    kl: float
    kl_error: float | None
    agreement: float
    agreement_error: float | None

    @classmethod
    def of(cls, layers: Sequence[int], rules: Sequence[str], flops: int, quality: Quality) -> Self:
        """Of a measured quality."""
        errors = (_standard_error(values) for values in (quality.kl_per_prompt, quality.agreement_per_prompt))
        kl_error, agreement_error = errors
        return cls(tuple(layers), tuple(rules), flops, quality.kl, kl_error, quality.agreement, agreement_error)

    @classmethod
    def dense(cls, flops: int) -> Self:
        """The dense model itself."""
        return cls((), (), flops, 0.0, 0.0, 1.0, 0.0)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Self:
        """The inverse of `asdict`.

        Raises:
            KeyError, TypeError, ValueError: if something is missing or wrong.
        """
        errors = [None if data[name] is None else _finite(data[name]) for name in ("kl_error", "agreement_error")]
        layers, rules = tuple(map(_whole, data["layers"])), tuple(map(str, data["rules"]))
        return cls(
            layers, rules, _whole(data["flops"]), _finite(data["kl"]), errors[0], _finite(data["agreement"]), errors[1]
        )

    def dominates(self, other: Point) -> bool:
        """Whether this one is as good in everything and better in something."""
        ours, theirs = ((point.flops, point.kl, -point.agreement) for point in (self, other))
        return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


@dataclass(frozen=True)
class Plan:
    """What was measured, and what is best.

    Attributes:
        model: name, architecture, number of layers and checksum of the weights.
        settings: of the measurement.
        bound: on the quality.
        dense_flops: of the dense model up to the first token.
        points: the candidates, in the order in which they were measured.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    bound: Bound
    dense_flops: int
    points: tuple[Point, ...]

    @property
    def best(self) -> Point:
        """The fewest operations within the bound; among equals the closest to the dense model, then the deepest.

        The dense model, which skips nothing, where no candidate is within the bound.
        """
        return min((point for point in self._with_dense() if self.bound.holds(point)), key=_rank)

    @property
    def frontier(self) -> tuple[Point, ...]:
        """The candidates, and the dense model, that no other one dominates, from slow to fast; equal ones once."""
        found: dict[tuple[float, ...], Point] = {}
        for point in sorted(self._with_dense(), key=_rank, reverse=True):
            if not any(other.dominates(point) for other in self.points):
                found[point.flops, point.kl, point.agreement] = point
        return tuple(found.values())

    @property
    def method(self) -> PrefillOnlyPruning:
        """The best setting."""
        return PrefillOnlyPruning(layers=self.best.layers)

    def speedup(self, point: Point) -> float:
        """The ideal one of the time to the first token."""
        return self.dense_flops / point.flops

    def ratio(self, point: Point) -> float:
        """The share of the layers that is skipped."""
        return len(point.layers) / int(self.model["num_hidden_layers"])

    def _with_dense(self) -> tuple[Point, ...]:
        return (Point.dense(self.dense_flops), *self.points)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        frontier, best = self.frontier, self.best
        points = [
            {
                **asdict(point),
                "ratio": self.ratio(point),
                "ideal_speedup": self.speedup(point),
                "within_bound": self.bound.holds(point),
                "on_frontier": point in frontier,
            }
            for point in self.points
        ]
        return {
            "model": self.model,
            "settings": self.settings,
            "bound": asdict(self.bound),
            "dense_flops": self.dense_flops,
            "best": {**asdict(best), "ratio": self.ratio(best), "ideal_speedup": self.speedup(best)},
            "points": points,
        }

    def save(self, path: str | Path) -> None:
        """Write a settings file with the best setting, for this model, and how it was found.

        Raises:
            OutputFileError: if that fails.
        """
        content = {name: value for name, value in self.to_dict().items() if name != "model"}
        SettingsFile((self.method,), self.model, content).save(path)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Read what `save` wrote.

        Raises:
            ResultFileError: if the file is missing, damaged or truncated, of another kind or version, or holds no plan.
        """
        file = SettingsFile.load(path)
        if file.model is None or file.plan is None:
            raise ResultFileError(f"{str(path)!r} holds settings, but no plan that led to them")
        data = file.plan
        try:
            points = tuple(map(Point.from_dict, data["points"]))
            plan = cls(file.model, dict(data["settings"]), Bound(**data["bound"]), _whole(data["dense_flops"]), points)
            if (plan.method,) != file.methods:
                raise ValueError("its settings are not what its measurements lead to")
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise ResultFileError(f"{str(path)!r} is no complete {KIND} file: {error}") from error
        return plan


def _rank(point: Point) -> tuple[Any, ...]:
    return point.flops, point.kl, -point.agreement, tuple(-layer for layer in point.layers)


def _standard_error(values: Sequence[float]) -> float | None:
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None


def _whole(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{value!r} is no whole number")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number
