"""Stage-aware importance of layers (arXiv 2602.03295, Eq. 13), and the file that holds it.

    I_l^stage = E[(dL / dg_l^stage)^2]

is the mean over samples of the squared gradient by the layer's gate of that stage, in squared nats: about twice the
increase of the loss when the layer is removed from that stage alone (Eq. 6 to 9 drop the factor 1/2).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

from stageprune.errors import ResultFileError
from stageprune.records import read_record, sealed, write_record

KIND, VERSION = "stageprune-importance", 1

Stage: TypeAlias = Literal["prefill", "decode"]
DRIFTS = ("hidden_states", "keys", "values", "attention")


@dataclass(frozen=True)
class Estimate:
    """A mean over samples.

    Attributes:
        mean: of the samples.
        standard_error: the standard deviation of that mean; None for a single sample.
    """

    mean: float
    standard_error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of one value or more; the order of the values does not matter, not even for the last bit."""
        count = len(values)
        mean = math.fsum(values) / count
        if count == 1:
            return cls(mean, None)
        squares = math.fsum((value - mean) ** 2 for value in values)
        return cls(mean, math.sqrt(squares / (count - 1) / count))

    @property
    def sigmas(self) -> float:
        """How many standard errors the mean is away from 0; 0 where all values are 0, or there is one only."""
        return abs(self.mean) / self.standard_error if self.standard_error else 0.0


@dataclass(frozen=True)
class Drift:
    """Cosine similarity between the full and the prefill-pruned model in one sample, for some layers in order.

    Attributes:
        hidden_states: that enter the layer, over prompt positions.
        keys: of the prompt positions, all heads together.
        values: likewise.
        attention: the attention branch's output, over the decode positions (last prompt token and response).
    """

    hidden_states: tuple[float, ...]
    keys: tuple[float, ...]
    values: tuple[float, ...]
    attention: tuple[float, ...]


@dataclass(frozen=True)
class SampleScore:
    """What one calibration sample says.

    Attributes:
        index: of the sample.
        prompt_tokens: its length.
        response_tokens: the length of the response that was sampled.
        loss: of the response, in nats.
        prefill: the gradient of the loss by each layer's prefill gate.
        decode: by each layer's decode gate.
        drift: of the layers from the first skipped one on; empty if none is skipped.
    """

    index: int
    prompt_tokens: int
    response_tokens: int
    loss: float
    prefill: tuple[float, ...]
    decode: tuple[float, ...]
    drift: Drift

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data, with lists for tuples."""
        drift = {what: list(getattr(self.drift, what)) for what in DRIFTS}
        return {**asdict(self), "prefill": list(self.prefill), "decode": list(self.decode), "drift": drift}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SampleScore:
        """From what `to_dict` gave.

        Raises:
            ValueError: if something is missing or of the wrong type.
        """
        try:
            drift = Drift(**{name: _numbers(data["drift"][name]) for name in DRIFTS})
            return cls(
                index=int(data["index"]),
                prompt_tokens=int(data["prompt_tokens"]),
                response_tokens=int(data["response_tokens"]),
                loss=float(data["loss"]),
                prefill=_numbers(data["prefill"]),
                decode=_numbers(data["decode"]),
                drift=drift,
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class Importance:
    """The importance of each layer in each stage, with everything it was computed from.

    Attributes:
        model: what was analysed: name, architecture, number of layers, dtype, a fingerprint of the weights.
        settings: how: data, seed, lengths and so on.
        samples: the scores of each sample, in order of their index.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    samples: tuple[SampleScore, ...]
    _estimates: dict[Any, tuple[Estimate, ...]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def num_hidden_layers(self) -> int:
        """Of the model."""
        return len(self.samples[0].prefill)

    def scores(self, stage: Stage) -> tuple[Estimate, ...]:
        """The importance of each layer in a stage (Eq. 13): the mean squared gradient, and its standard error."""
        return self._over_samples((stage, 2), ([value**2 for value in getattr(s, stage)] for s in self.samples))

    def gradients(self, stage: Stage) -> tuple[Estimate, ...]:
        """The mean gradient of each layer in a stage, which Eq. 7 says is 0 but for the standard error."""
        return self._over_samples((stage, 1), (getattr(sample, stage) for sample in self.samples))

    def drift(self, what: str) -> tuple[Estimate, ...]:
        """The cosine similarity of one of `DRIFTS` for each of `drift_layers`."""
        return self._over_samples(what, (getattr(sample.drift, what) for sample in self.samples))

    @cached_property
    def drift_layers(self) -> range:
        """The layers from the first skipped one on."""
        count = len(self.samples[0].drift.keys)
        return range(self.num_hidden_layers - count, self.num_hidden_layers)

    @property
    def largest_bias(self) -> float:
        """The largest mean gradient of any layer and stage in standard errors: about 2 to 4 if Eq. 7 holds."""
        stages: tuple[Stage, Stage] = ("prefill", "decode")
        return max(estimate.sigmas for stage in stages for estimate in self.gradients(stage))

    def _over_samples(self, key: Any, rows: Iterable[Sequence[float]]) -> tuple[Estimate, ...]:
        if key not in self._estimates:
            self._estimates[key] = tuple(map(Estimate.of, zip(*rows, strict=True)))
        return self._estimates[key]

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data: what `save` writes, with a summary for each layer."""
        return sealed(KIND, VERSION, self._content())

    def _content(self) -> dict[str, Any]:
        layers = [
            {"layer": index, **{stage: self._summary(stage, index) for stage in ("prefill", "decode")}}
            for index in range(self.num_hidden_layers)
        ]
        drift = [
            {"layer": layer, **{what: asdict(self.drift(what)[place]) for what in DRIFTS}}
            for place, layer in enumerate(self.drift_layers)
        ]
        samples = [sample.to_dict() for sample in self.samples]
        return {"model": self.model, "settings": self.settings, "layers": layers, "drift": drift, "samples": samples}

    def _summary(self, stage: Any, index: int) -> dict[str, Any]:
        score, gradient = self.scores(stage)[index], self.gradients(stage)[index]
        return {
            "importance": score.mean,
            "standard_error": score.standard_error,
            "mean_gradient": gradient.mean,
            "mean_gradient_standard_error": gradient.standard_error,
        }

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all.

        Raises:
            OutputFileError: if that fails.
        """
        write_record(Path(path), KIND, VERSION, self._content())

    @classmethod
    def load(cls, path: str | Path) -> Importance:
        """Read what `save` wrote.

        Raises:
            ResultFileError: if the file is missing, damaged, truncated, or of another kind or version.
        """
        data = read_record(Path(path), KIND, VERSION)
        try:
            samples = tuple(SampleScore.from_dict(sample) for sample in data["samples"])
            importance = cls(dict(data["model"]), dict(data["settings"]), samples)
            importance._check()
        except (KeyError, TypeError, ValueError) as error:
            raise ResultFileError(f"{str(path)!r} is no complete {KIND} file: {error}") from error
        return importance

    def _check(self) -> None:
        """Raise ValueError unless there are samples and all speak of the same layers."""
        if not self.samples:
            raise ValueError("it has no samples")
        shapes = {
            (len(sample.prefill), len(sample.decode), *(len(getattr(sample.drift, f.name)) for f in fields(Drift)))
            for sample in self.samples
        }
        if len(shapes) != 1 or len(set(next(iter(shapes))[:2])) != 1 or len(set(next(iter(shapes))[2:])) != 1:
            raise ValueError("its samples speak of different layers")


def _numbers(values: Any) -> tuple[float, ...]:
    numbers = tuple(float(value) for value in values)
    if not all(map(math.isfinite, numbers)):
        raise ValueError("a number is not finite")
    return numbers
