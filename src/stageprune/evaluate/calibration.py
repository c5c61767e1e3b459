"""Fitting K/V projections over calibration prompts, one at a time, and measuring what the fit is worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageprune.errors import NumericsError, SettingError
from stageprune.families.decoder import find_decoder
from stageprune.families.probe import input_device
from stageprune.prefill.fitting import Fitter, Sums
from stageprune.prefill.projections import Correction, split

HELD_OUT = 0.1
"""Share of the prompts that the fit does not see, on which it is measured; at least one prompt."""


class Reading:
    """What calibration keeps of the prompts: sums over those of the fit, and over those held out.

    Args:
        model: not pruned; it is left unchanged.
        skipped: the layers to fit.
        attention: whether tokens are weighted by the attention that they get; else equally.

    Attributes:
        samples: how many prompts were read.
        fit: of each layer, over the prompts of the fit.
        held_out: likewise, over the others.
        decoder: of the model.
        own: the layers' own linear layers.

    Raises:
        SettingError: if no layer is skipped.
        UnsupportedModelError: if a layer's keys and values cannot be described.
    """

    def __init__(self, model: Any, skipped: Sequence[int], attention: bool = True) -> None:
        if not skipped:
            raise SettingError("no layer is skipped, so there is no projection to fit; give a larger ratio")
        decoder = find_decoder(model)
        self._device = input_device(decoder)
        self.decoder = decoder
        self._fitter = Fitter(decoder, skipped, attention)
        self.samples = 0
        self.fit = self._fitter.zeros()
        self.held_out = self._fitter.zeros()
        self.own = self._fitter.own

    def tensors(self) -> dict[str, torch.Tensor]:
        """All sums by name."""
        return {
            f"{part}.{index}.{name}": tensor
            for part, layers in (("fit", self.fit), ("held_out", self.held_out))
            for index, sums in layers.items()
            for name, tensor in sums.tensors().items()
        }

    def read(self, prompts: Sequence[Sequence[int]], on_sample: Callable[[int], object] = lambda samples: None) -> None:
        """Read the prompts that were not read yet; the first ones are those held out.

        Args:
            prompts: token ids, all of them.
            on_sample: called after each with how many were read.

        Raises:
            SettingError: if there are fewer than two.
            NumericsError: if the model's activations are not finite.
        """
        held_out = count_held_out(len(prompts))
        for prompt in prompts[self.samples :]:
            sums = self.held_out if self.samples < held_out else self.fit
            self._fitter.read(sums, torch.tensor([prompt], device=self._device))
            if not all(bool(one.squares.isfinite().all()) for one in sums.values()):
                raise NumericsError(
                    f"the activations of sample {self.samples} are not finite: an overflow, usual with float16; load "
                    "the model in bfloat16 or float32"
                )
            self.samples += 1
            on_sample(self.samples)


def count_held_out(samples: int) -> int:
    """How many of so many prompts the fit does not see.

    Raises:
        SettingError: if none would be left for it.
    """
    if samples < 2:
        raise SettingError(f"calibration needs at least 2 samples, one to fit and one to measure; got {samples}")
    return max(1, round(samples * HELD_OUT))


@dataclass(frozen=True)
class Unexplained:
    """Squared errors of one layer's keys or values, over the full model's variance on the same text.

    Attributes:
        part: `"keys"` or `"values"`.
        text: `"fit"` or `"held_out"`.
        own: with the layer's own weights.
        full_rank: with the correction before its rank was reduced.
        fitted: with the correction that is stored.
    """

    part: str
    text: str
    own: float
    full_rank: float
    fitted: float


@dataclass(frozen=True)
class FittedLayer:
    """One layer's fit.

    Attributes:
        layer: its index.
        correction: of its K/V weights.
        unexplained: of keys and values, on the text of the fit and on that held out.
    """

    layer: int
    correction: Correction
    unexplained: tuple[Unexplained, ...]

    def share(self, part: str, text: str) -> Unexplained:
        """What is left of keys or values on one of the texts."""
        return next(one for one in self.unexplained if (one.part, one.text) == (part, text))


def solve(reading: Reading, ridge: float, rank: int | None) -> Iterator[FittedLayer]:
    """Fit the layers, one after the other.

    Args:
        reading: of all prompts.
        ridge: see `Sums.solve`.
        rank: of the corrections; None for full rank.

    Raises:
        SettingError: if the corrections have no such rank.
    """
    check_rank(reading, rank)
    for index, sums in reading.fit.items():
        keys = reading.own[index].keys
        full = Correction.of(*sums.solve(ridge))
        stored = full if rank is None else full.low_rank(rank, sums, keys)
        texts = (("fit", sums), ("held_out", reading.held_out[index]))
        shares = [one for text, over in texts for one in _unexplained(text, over, full, stored, keys)]
        yield FittedLayer(index, stored, tuple(shares))


def check_rank(reading: Reading, rank: int | None) -> None:
    """Find out before a long run that its corrections have no such rank.

    Raises:
        SettingError: if that is so.
    """
    most = min(min(own.weight.shape) for own in reading.own.values())
    if rank is not None and rank >= most:
        raise SettingError(f"rank must be less than {most}, that of the full matrices; got {rank}")


def _unexplained(text: str, sums: Sums, full: Correction, stored: Correction, keys: int) -> Iterator[Unexplained]:
    left = (sums.squares, sums.errors(full.whole, full.bias), sums.errors(stored.whole, stored.bias))
    parts = zip(("keys", "values"), split(sums.variance(), keys), *(split(part, keys) for part in left), strict=True)
    for part, variance, *errors in parts:
        total = float(variance.sum())
        own, full_rank, fitted = (float(error.sum()) / total if total else 0.0 for error in errors)
        yield Unexplained(part, text, own, full_rank, fitted)
