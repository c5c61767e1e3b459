"""Fitted K/V projections: the linear layers that predict a skipped layer's keys and values best (beyond the paper).

A skipped layer l gets keys and values from the hidden state h where skipping begins, through weights that expect the
layer's own input x_l. With n = norm_l(h) and the layer's linear layers W, the full model caches W norm_l(x_l) (before
key norm and rotary embedding), and prefill-only pruning caches W n. The correction D that brings the second closest to
the first is a ridge regression in closed form,

    D = sum_t w_t e_t n_t^T (sum_t w_t n_t n_t^T + lambda I)^-1,   e_t = W norm_l(x_t) - W n_t,

over the tokens t of some text, without labels or gradients; W + D costs nothing more than W at run time. The sums are
all that is kept of the text, so memory does not grow with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.families.decoder import Decoder
from stageprune.families.kv import KVProjection
from stageprune.families.verify import VerifiedLayer, verify_layers
from stageprune.overrides import MethodOverride


@dataclass
class Sums:
    """Normal equations of one layer, float64 on the CPU.

    Attributes:
        gram: sum of `w n n^T`, with a constant 1 behind n, `[hidden_size + 1, hidden_size + 1]`.
        cross: sum of `w e n^T`, `[features, hidden_size + 1]`; features are all keys, then all values.
        squares: sum of `w e^2`, `[features]`.
        targets: sum of `w (W norm(x))^2`, `[features]`.
        weight: sum of `w`.
    """

    gram: torch.Tensor
    cross: torch.Tensor
    squares: torch.Tensor
    targets: torch.Tensor
    weight: float = 0.0

    @classmethod
    def zeros(cls, hidden_size: int, features: int) -> Sums:
        """Before any token."""
        size, double = hidden_size + 1, torch.float64
        return cls(
            torch.zeros(size, size, dtype=double),
            torch.zeros(features, size, dtype=double),
            torch.zeros(features, dtype=double),
            torch.zeros(features, dtype=double),
        )

    def add(self, inputs: torch.Tensor, errors: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor) -> None:
        """Take in tokens.

        Args:
            inputs: n, `[tokens, hidden_size]`.
            errors: e, `[tokens, features]`.
            targets: of the full model, `[tokens, features]`.
            weights: w, `[tokens]`.
        """
        double = torch.float64
        weights = weights.to("cpu", double)[:, None]
        inputs = torch.nn.functional.pad(inputs.to("cpu", double), (0, 1), value=1.0)
        errors, targets = errors.to("cpu", double), targets.to("cpu", double)
        weighted = weights * inputs
        self.gram += weighted.T @ inputs
        self.cross += errors.T @ weighted
        self.squares += (weights * errors.square()).sum(0)
        self.targets += (weights * targets.square()).sum(0)
        self.weight += float(weights.sum())

    def solve(self, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The correction of weights `[features, hidden_size]` and bias `[features]`.

        Args:
            ridge: lambda, in units of the mean square of an input; the constant is not penalised.
        """
        size = len(self.gram) - 1
        penalty = torch.full((size + 1,), ridge * float(self.gram.diagonal()[:size].mean()), dtype=torch.float64)
        penalty[size] = 1e-12 * max(self.weight, 1.0)
        solution = torch.linalg.solve(self.gram + penalty.diag(), self.cross.T, left=True).T
        return solution[:, :size], solution[:, size]

    def explained(self, correction: torch.Tensor, bias: torch.Tensor) -> tuple[float, float]:
        """Mean squared error over mean square of the target, without and with the correction, on these tokens."""
        whole = torch.cat((correction, bias[:, None]), dim=1)
        left = self.squares - 2 * (whole * self.cross).sum(1) + ((whole @ self.gram) * whole).sum(1)
        total = float(self.targets.sum())
        return float(self.squares.sum()) / total, float(left.sum()) / total


class Fitter:
    """Collects the sums of all skipped layers while the full model reads text.

    Args:
        decoder: of a model that is not pruned.
        skipped: the layers, consecutive to the last one or in several runs.
    """

    def __init__(self, decoder: Decoder, skipped: Sequence[int]) -> None:
        self._model: Any = decoder.model
        self._layers = verify_layers(decoder, skipped)
        self._first = first_of_runs(skipped)
        self.sums = {
            index: Sums.zeros(decoder.config.hidden_size, _features(one)) for index, one in self._layers.items()
        }

    @torch.no_grad()
    def read(self, input_ids: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        """Let the model read text.

        Args:
            input_ids: `[batch, length]`, no padding.
            weights: of each token, `[batch, length]`; equal by default.
        """
        flat = torch.ones(input_ids.numel()) if weights is None else weights.reshape(-1)
        with self._inputs() as inputs:
            self._model(input_ids=input_ids, use_cache=False, logits_to_keep=1)
        for index, one in self._layers.items():
            normed = one.project.normed(one.layer, inputs[self._first[index]])
            guess = torch.cat(one.project.linear(one.layer, normed), dim=-1).flatten(0, 1)
            own = one.project.normed(one.layer, inputs[index])
            target = torch.cat(one.project.linear(one.layer, own), dim=-1).flatten(0, 1)
            self.sums[index].add(normed.flatten(0, 1), target.double() - guess.double(), target, flat)

    @contextmanager
    def _inputs(self) -> Iterator[dict[int, torch.Tensor]]:
        """What enters the layers in a forward pass inside the block, by index."""
        found: dict[int, torch.Tensor] = {}

        def watch(index: int, one: VerifiedLayer) -> MethodOverride:
            def call(forward: Any, *args: Any, **kwargs: Any) -> Any:
                found[index] = one.signature.bind(args, kwargs).hidden_states
                return forward(*args, **kwargs)

            return MethodOverride(one.layer, "forward", call, owner=self)

        overrides = [watch(index, one) for index, one in self._layers.items()]
        try:
            yield found
        finally:
            for override in overrides:
                override.remove()


def first_of_runs(skipped: Sequence[int]) -> dict[int, int]:
    """For each skipped layer the first of its run of consecutive ones: where the hidden state comes from."""
    first: dict[int, int] = {}
    for index in sorted(skipped):
        first[index] = first.get(index - 1, index)
    return first


class FittedProjection(KVProjection):
    """A layer's K/V projection with fitted linear layers.

    Args:
        base: the layer's own.
        weight: `[features, hidden_size]`, keys first.
        bias: `[features]`.
        keys: how many features are keys.
    """

    def __init__(self, base: KVProjection, weight: torch.Tensor, bias: torch.Tensor, keys: int) -> None:
        self._base = base
        self._weight = weight
        self._bias = bias
        self._keys = keys

    @property
    def nbytes(self) -> int:
        """Memory of the fitted weights."""
        return self._weight.nbytes + self._bias.nbytes

    def normed(self, layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """See `KVProjection`."""
        return self._base.normed(layer, hidden_states)

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVProjection`."""
        features = torch.nn.functional.linear(normed, self._weight, self._bias)
        return features[..., : self._keys], features[..., self._keys :]

    def finish(
        self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `KVProjection`."""
        return self._base.finish(layer, keys, values, positions)

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        return self._weight.numel()


@torch.no_grad()
def own_weights(one: VerifiedLayer) -> tuple[torch.Tensor, torch.Tensor, int]:
    """The layer's own linear layers as one matrix `[features, hidden_size]`, float64, its bias, and the keys' count.

    Read off their answers, so that it works for every shape of attention.
    """
    parameter = next(one.layer.parameters())
    size = _hidden_size(one)
    zeros = torch.zeros(1, 1, size, device=parameter.device, dtype=parameter.dtype)
    keys, values = one.project.linear(one.layer, zeros)
    bias = torch.cat((keys, values), dim=-1)[0, 0].double().cpu()
    eye = torch.eye(size, device=parameter.device, dtype=parameter.dtype)[None]
    columns = torch.cat(one.project.linear(one.layer, eye), dim=-1)[0].double().cpu()
    return (columns - bias).T.contiguous(), bias, keys.shape[-1]


def _features(one: VerifiedLayer) -> int:
    return len(own_weights(one)[1])


def _hidden_size(one: VerifiedLayer) -> int:
    for name in ("k_proj", "qkv_proj", "query_key_value"):
        for module_name, module in one.layer.named_modules():
            if module_name.endswith(name):
                return int(module.in_features)
    raise AssertionError(f"layer {one.index} has no K/V projection")
