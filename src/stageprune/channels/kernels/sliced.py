"""Contiguous copies of the computed channels' weights, made once per prompt.

For the selections whose channels the prompt fixes: `partition` and `fixed`. Candidates that a token does not pick are
set to zero before the down projection, so that one is read for all computed channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn import functional as F

from stageprune.channels.kernels.base import Layer
from stageprune.channels.kernels.masked import channel_scores
from stageprune.channels.partition import Partition, ranked


@dataclass(frozen=True)
class Slices:
    """Weights of one group's channels."""

    gate: torch.Tensor | None
    gate_bias: torch.Tensor | None
    up: torch.Tensor
    up_bias: torch.Tensor | None
    down: torch.Tensor
    norms: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Memory of the copies."""
        return sum(weight.nbytes for weight in (self.gate, self.up, self.down) if weight is not None)


class SlicedBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "sliced"
    weight_bytes = 0

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def bind(self, partition: Partition) -> list[Slices]:
        """The copies, one for each group."""
        fixed = self._layer.selection == "fixed"
        channels = partition.order[:, : partition.sizes.active].sort(1).values if fixed else partition.computed
        return [self._slices(rows) for rows in channels]

    def _slices(self, rows: torch.Tensor) -> Slices:
        ffn = self._layer.ffn
        gate = ffn.gate
        return Slices(
            gate=None if gate is None else gate.weight[rows],
            gate_bias=None if gate is None or gate.bias is None else gate.bias[rows],
            up=ffn.up.weight[rows],
            up_bias=None if ffn.up.bias is None else ffn.up.bias[rows],
            down=ffn.down.weight[:, rows],
            norms=self._layer.column_norms[rows],
        )

    def bound_bytes(self, bound: list[Slices]) -> int:
        """Of the copies."""
        return sum(slices.nbytes for slices in bound)

    def run(self, inputs: torch.Tensor, partition: Partition, bound: list[Slices]) -> torch.Tensor:
        """See `Backend.run`."""
        if len(bound) == 1:
            return self._run(inputs, partition, 0, bound[0])
        return torch.cat(
            [self._run(inputs[group : group + 1], partition, group, one) for group, one in enumerate(bound)]
        )

    def _run(self, inputs: torch.Tensor, partition: Partition, group: int, weights: Slices) -> torch.Tensor:
        ffn = self._layer.ffn
        hidden = F.linear(inputs, weights.up, weights.up_bias)
        if weights.gate is None:
            hidden = ffn.act(hidden)
        else:
            hidden = ffn.act(F.linear(inputs, weights.gate, weights.gate_bias)) * hidden
        if self._layer.selection == "partition":
            candidates = partition.candidates[group]
            scores = channel_scores(hidden[..., candidates], weights.norms[candidates], groups=1)
            dropped = candidates[ranked(scores)[..., partition.sizes.picked :]]
            hidden = hidden.scatter(-1, dropped.expand(len(hidden), -1, -1), 0)
        return F.linear(hidden, weights.down, ffn.down.bias)
