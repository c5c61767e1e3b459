"""No copies: compiled kernels read only the weight rows that a token needs (`native.cpp`, `triton_kernels.py`).

The down projection is kept a second time, transposed, so that a channel is a contiguous row in all three matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from stageprune.channels.kernels.base import Layer
from stageprune.channels.kernels.engine import engine, why_no_engine
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.partition import Partition
from stageprune.families.ffn import activation_name

_MOST_ROWS = 16
"""Above this many rows at once, matrix multiplication on all channels is the faster way."""


def why_not_indexed(layer: Layer) -> str | None:
    """What keeps the kernels from running this layer; None if nothing does."""
    ffn = layer.ffn
    if not ffn.plain:
        return "the weights are quantized, adapted or offloaded"
    if activation_name(ffn.act) is None:
        return f"no kernel for the activation {type(ffn.act).__name__}"
    return why_no_engine(ffn.up.weight.device)


@dataclass(frozen=True)
class Lists:
    """Which channels one group computes, and among which of them a token chooses, as the kernels want them.

    Attributes:
        channels: ascending, int32; None for all.
        choices: positions in `channels`, int32; None where nothing is chosen.
        count: how many are chosen.
        up_sizes: what the choice by the gate alone assumes of the up projections, `[h]`; None where it is not by that.
        active: how many of the chosen ones enter the down projection; None for all.
    """

    channels: torch.Tensor | None
    choices: torch.Tensor | None
    count: int
    up_sizes: torch.Tensor | None = None
    active: int | None = None


class IndexedBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "indexed"

    def __init__(self, layer: Layer) -> None:
        ffn = layer.ffn
        self._layer = layer
        self._masked = MaskedBackend(layer)
        self._act = activation_name(ffn.act)
        self._decode = engine(ffn.up.weight.device)
        self._down = ffn.down.weight.detach().t().contiguous()
        # Looked up once: for a small model, looking them up in their modules takes as long as reading some of them.
        gate = (None, None) if ffn.gate is None else (ffn.gate.weight, ffn.gate.bias)
        self._weights = gate[0], ffn.up.weight, self._down, gate[1], ffn.up.bias, ffn.down.bias

    @property
    def weight_bytes(self) -> int:
        """The transposed down projection."""
        return self._down.nbytes

    def bind(self, partition: Partition) -> list[Lists]:
        """Index lists, one for each group."""
        return [self._lists(partition, group) for group in range(len(partition.order))]

    def _lists(self, partition: Partition, group: int) -> Lists:
        sizes, selection = partition.sizes, self._layer.selection

        def first(count: int) -> torch.Tensor:
            return torch.arange(count, dtype=torch.int32, device=partition.order.device)

        if selection == "fixed":
            return Lists(partition.order[group, : sizes.active].sort().values.int(), None, 0)
        if selection == "partition":
            return Lists(partition.computed[group].int(), partition.candidates[group].int(), sizes.picked)
        if selection == "full":
            return Lists(None, first(sizes.total), sizes.active)
        channels = None if sizes.computed == sizes.total else partition.computed[group].int()
        if selection == "gate":
            return Lists(channels, first(sizes.computed), sizes.up, self._layer.up_norms)
        assert partition.up_sizes is not None
        return Lists(channels, first(sizes.computed), sizes.up, partition.up_sizes[group], sizes.active)

    def bound_bytes(self, bound: list[Lists]) -> int:
        """Of the lists."""
        lists = [part for one in bound for part in (one.channels, one.choices) if part is not None]
        return sum(part.nbytes for part in lists)

    def run(self, inputs: torch.Tensor, partition: Partition, bound: list[Lists]) -> torch.Tensor:
        """See `Backend.run`."""
        batch, rows, _ = inputs.shape
        if batch * rows > _MOST_ROWS:
            return self._masked.run(inputs, partition, None)
        if len(bound) == batch == 1:
            return self._call(inputs[0], bound[0], False)[None]
        if len(bound) == batch:  # each sequence has its own partition
            return torch.stack([self._call(one, lists, False) for one, lists in zip(inputs, bound, strict=True)])
        # The batch shares partition and choice, step by step.
        return torch.stack([self._call(inputs[:, row], bound[0], True) for row in range(rows)], dim=1)

    def _call(self, inputs: torch.Tensor, lists: Lists, shared: bool) -> torch.Tensor:
        """One call of the kernels, for rows `[rows, hidden_size]`, which share a choice or make each its own."""
        outputs, _ = self._decode(
            inputs.contiguous(),
            *self._weights,
            lists.channels,
            lists.choices,
            lists.count,
            self._layer.column_norms,
            lists.up_sizes,
            self._act,
            shared,
            lists.active,
        )
        return outputs
