"""Fitted K/V projections: the linear layers that predict a skipped layer's keys and values best (beyond the paper).

A skipped layer l gets keys and values from the hidden state h where skipping begins, through weights that expect the
layer's own input x_l. With n = norm_l(h) and the layer's linear layers W, the full model caches W norm_l(x_l) (before
key norm and rotary embedding), and prefill-only pruning caches W n. The correction D that brings the second closest to
the first is a ridge regression in closed form,

    D = sum_t w_t e_t n_t^T (sum_t w_t n_t n_t^T + lambda I)^-1,   e_t = W (norm_l(x_t) - n_t),

over the tokens t of some text, without labels or gradients; W + D costs nothing more than W at run time. The weight w_t
of a token is the attention that it gets in that layer, or 1. The sums are all that is kept of the text, so memory does
not grow with it. A constant stands beside n, whose part of D is a bias.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch.nn import functional as F

from stageprune.families.decoder import Decoder
from stageprune.families.verify import VerifiedLayer, verify_layers
from stageprune.overrides import MethodOverride
from stageprune.prefill.attention_mass import attention_mass
from stageprune.prefill.fitted import exact_device, own_weights
from stageprune.prefill.layers import runs_of


@dataclass
class Sums:
    """Normal equations of one layer, float64. Features are all keys, then all values.

    Attributes:
        gram: sum of `w n n^T`, with a constant 1 behind n, `[hidden_size + 1, hidden_size + 1]`.
        cross: sum of `w e n^T`, `[features, hidden_size + 1]`.
        squares: sum of `w e^2`, `[features]`.
        targets: sum of `w t`, with the full model's t = W norm(x), `[features]`.
        target_squares: sum of `w t^2`, `[features]`.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    squares: torch.Tensor
    targets: torch.Tensor
    target_squares: torch.Tensor

    @classmethod
    def zeros(cls, hidden_size: int, features: int, device: torch.device | None = None) -> Sums:
        """Before any token."""
        shapes = ((hidden_size + 1, hidden_size + 1), (features, hidden_size + 1), features, features, features)
        return cls(*(torch.zeros(shape, dtype=torch.float64, device=device) for shape in shapes))

    @property
    def weight(self) -> float:
        """Sum of `w`."""
        return float(self.gram[-1, -1])

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def add(self, inputs: torch.Tensor, errors: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> None:
        """Take in tokens.

        Args:
            inputs: n, `[tokens, hidden_size]`.
            errors: e, `[tokens, features]`.
            targets: t, `[tokens, features]`.
            weights: w, `[tokens]`.
        """
        inputs, errors, targets, weights = (part.to(self.gram) for part in (inputs, errors, targets, weights))
        inputs = F.pad(inputs, (0, 1), value=1.0)
        weights = weights[:, None]
        weighted = weights * inputs
        self.gram += weighted.T @ inputs
        self.cross += errors.T @ weighted
        self.squares += (weights * errors.square()).sum(0)
        self.targets += (weights * targets).sum(0)
        self.target_squares += (weights * targets.square()).sum(0)

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction of weights `[features, hidden_size]` and bias `[features]`.

        Args:
            ridge: lambda, in units of the mean square of an input; the constant is not penalised.
        """
        size = len(self.gram) - 1
        penalty = torch.zeros_like(self.gram[0])
        penalty[:size] = ridge * self.gram.diagonal()[:size].mean()
        solution = torch.linalg.solve(self.gram + penalty.diag(), self.cross.T).T
        return solution[:, :size], solution[:, size]

    def errors(self, correction: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Sum of `w (e - D n)^2` with this correction, `[features]`."""
        whole = torch.cat((correction, bias[:, None]), dim=1).to(self.gram)
        return (self.squares - 2 * (whole * self.cross).sum(1) + ((whole @ self.gram) * whole).sum(1)).clamp(min=0)

    def variance(self) -> torch.Tensor:
        """Sum of `w (t - mean of t)^2`, `[features]`."""
        return (self.target_squares - self.targets.square() / self.weight).clamp(min=0)

    def covariance(self) -> torch.Tensor:
        """Sum of `w (n - mean of n) (n - mean of n)^T`, `[hidden_size, hidden_size]`."""
        total = self.gram[:-1, -1]
        return self.gram[:-1, :-1] - total[:, None] * total / self.weight


class Fitter:
    """Collects the sums of skipped layers while the model reads text.

    Args:
        decoder: of a model that is not pruned.
        skipped: the layers, in one run of consecutive ones or several.
        attention: whether a token counts as much as the attention that it gets, layer by layer; else all count 1.

    Attributes:
        own: the layers' own linear layers.

    Raises:
        UnsupportedModelError: if a layer's keys and values cannot be described.
    """

    def __init__(self, decoder: Decoder, skipped: Sequence[int], attention: bool = False) -> None:
        self._model: Any = decoder.model
        self._attention = attention
        self._layers = verify_layers(decoder, skipped)
        self._first = first_of_runs(skipped)
        self.own = {index: own_weights(one) for index, one in self._layers.items()}

    def zeros(self) -> dict[int, Sums]:
        """The sums of each layer before any text."""
        return {
            index: Sums.zeros(own.weight.shape[1], len(own.weight), own.weight.device)
            for index, own in self.own.items()
        }

    @torch.no_grad()
    def read(self, sums: Mapping[int, Sums], input_ids: torch.Tensor) -> None:
        """Let the model read text.

        Args:
            sums: of each layer; the text's tokens are added.
            input_ids: `[batch, length]`, no padding.

        Raises:
            UnsupportedModelError: if the model does not tell attention, by which tokens shall be weighted.
        """
        watched = {index: one.layer for index, one in self._layers.items()} if self._attention else {}
        with attention_mass(self._model, watched) as mass:
            full = self._inputs(input_ids, skip=False)
        # Prompt rows pass only through kept layers: behind the first run, what arrives is not what the full model has.
        pruned = full if len(set(self._first.values())) == 1 else self._inputs(input_ids, skip=True)
        for index, one in self._layers.items():
            weight = self.own[index].weight
            arriving = _normed(one, pruned[self._first[index]])
            expected = _normed(one, full[index])
            weights = mass[index].flatten() if watched else torch.ones(input_ids.numel())
            sums[index].add(arriving, (expected - arriving) @ weight.T, expected @ weight.T, weights)

    def _inputs(self, input_ids: torch.Tensor, skip: bool) -> dict[int, torch.Tensor]:
        """What enters the layers, by index; in the full model, or in one that skips them."""
        found: dict[int, torch.Tensor] = {}

        def watch(one: VerifiedLayer) -> MethodOverride:
            def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
                found[one.index] = one.signature.bind(args, kwargs).hidden_states
                if not skip:
                    return forward(*args, **kwargs)
                extra = one.extra_outputs
                return (found[one.index], *[None] * extra) if extra else found[one.index]

            return MethodOverride(one.layer, "forward", call)

        overrides = [watch(one) for one in self._layers.values()]
        try:
            self._model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        finally:
            for override in overrides:
                override.remove()
        return found


def first_of_runs(skipped: Sequence[int]) -> dict[int, int]:
    """For each skipped layer the first of its run of consecutive ones: where the hidden state comes from."""
    return {index: run[0] for run in runs_of(sorted(skipped)) for index in run}


def _normed(one: VerifiedLayer, hidden_states: torch.Tensor) -> torch.Tensor:
    """What the layer's linear layers read, `[tokens, hidden_size]`, float64."""
    normed = one.project.normed(one.layer, hidden_states.to(one.device)).flatten(0, 1)
    return normed.to(exact_device(one.device), torch.float64)
