"""Wanda: unstructured pruning by weights and activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from stageprune.baselines.base import Attachment, Baseline, Calibration, refuse_experts
from stageprune.baselines.calibration import watch_inputs
from stageprune.errors import UnsupportedModelError
from stageprune.families.decoder import Decoder
from stageprune.methods.base import share
from stageprune.stages import StageTracker


@dataclass(frozen=True)
class Wanda(Baseline):
    """Sets the weights with the least `|W[i, j]| * ||X_j||` of each output row to zero (arXiv 2306.11695).

    In all linear layers of the decoder layers, attention included. Nothing gets faster or smaller with dense kernels,
    which is how the prefill-only paper times it. Departure: statistics are of the dense model, not of layers that
    follow pruned ones.

    Args:
        ratio: share of each row.
    """

    kind: ClassVar[str] = "wanda"
    needs_calibration: ClassVar[bool] = True

    ratio: float = 0.3

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        refuse_experts(self, decoder)
        linears = [module for layer in decoder.layers for module in layer.modules() if isinstance(module, nn.Linear)]
        if not linears:
            raise UnsupportedModelError(f"{type(decoder.model).__name__} has no plain linear layers to prune")
        sums = {
            linear: torch.zeros(linear.in_features, dtype=torch.float64, device=linear.weight.device)
            for linear in linears
        }

        def watcher(linear: nn.Linear) -> Any:
            def see(inputs: torch.Tensor) -> None:
                sums[linear] += inputs.double().square().sum(0)

            return see

        watch_inputs(decoder, calibration, {linear: watcher(linear) for linear in linears})
        attachment = Attachment()
        for linear in linears:
            _swap(attachment, linear, masked(linear.weight.detach(), sums[linear].sqrt(), self.ratio))
        return attachment


def masked(weight: torch.Tensor, norms: torch.Tensor, ratio: float) -> torch.Tensor:
    """A copy with zeros: of each row the `floor(ratio * columns)` least scores; equal ones: the first columns."""
    scores = weight.double().abs() * norms
    least = scores.sort(dim=1, stable=True).indices[:, : int(ratio * weight.shape[1])]
    return weight.scatter(1, least, 0)


def _swap(attachment: Attachment, linear: nn.Linear, pruned: torch.Tensor) -> None:
    """Exchange the weights' storage: the parameter stays the one that it is."""
    own = linear.weight.data
    attachment.weight_bytes += pruned.nbytes

    def switch(dense: bool) -> None:
        linear.weight.data = own if dense else pruned

    attachment.on_switch(switch)
