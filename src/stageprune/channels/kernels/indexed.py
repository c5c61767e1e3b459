"""No copies: a compiled kernel reads only the weight rows that a token needs (`native.cpp`).

The down projection is kept a second time, transposed, so that a channel is a contiguous row in all three matrices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from stageprune.channels.kernels.base import Layer
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.kernels.native import load_native
from stageprune.channels.partition import Partition
from stageprune.families.ffn import activation_name

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_MOST_ROWS = 16
"""Above this many rows at once, matrix multiplication on all channels is the faster way."""


def why_not_indexed(layer: Layer) -> str | None:
    """What keeps the kernel from running this layer; None if nothing does."""
    ffn = layer.ffn
    if not ffn.plain:
        return "the weights are quantized, adapted or offloaded"
    weight = ffn.up.weight
    if weight.device.type != "cpu":
        return f"the kernel runs on the CPU, the weights are on {weight.device.type}"
    if weight.dtype not in _DTYPES:
        return f"no kernel for {weight.dtype}"
    if activation_name(ffn.act) is None:
        return f"no kernel for the activation {type(ffn.act).__name__}"
    return load_native()


@dataclass(frozen=True)
class Lists:
    """Which channels one group computes, and among which of them a token chooses, as the kernel wants them.

    Attributes:
        channels: ascending, int32; None for all.
        choices: positions in `channels`, int32; None where nothing is chosen.
        count: how many are chosen.
    """

    channels: torch.Tensor | None
    choices: torch.Tensor | None
    count: int


class IndexedBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "indexed"

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._masked = MaskedBackend(layer)
        self._act = activation_name(layer.ffn.act)
        self._down = layer.ffn.down.weight.detach().t().contiguous()

    @property
    def weight_bytes(self) -> int:
        """The transposed down projection."""
        return self._down.nbytes

    def bind(self, partition: Partition) -> list[Lists]:
        """Index lists, one for each group."""
        return [self._lists(partition, group) for group in range(len(partition.order))]

    def _lists(self, partition: Partition, group: int) -> Lists:
        sizes, selection = partition.sizes, self._layer.selection
        if selection == "fixed":
            return Lists(partition.order[group, : sizes.active].sort().values.int(), None, 0)
        if selection == "partition":
            return Lists(partition.computed[group].int(), partition.candidates[group].int(), sizes.picked)
        if selection == "full":
            return Lists(None, torch.arange(sizes.total, dtype=torch.int32), sizes.active)
        return Lists(partition.computed[group].int(), torch.arange(sizes.computed, dtype=torch.int32), sizes.active)

    def run(
        self, inputs: torch.Tensor, partition: Partition, bound: list[Lists]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Backend.run`."""
        batch, rows, _ = inputs.shape
        if batch * rows > _MOST_ROWS:
            return self._masked.run(inputs, partition, None)
        inputs = inputs.contiguous()
        if len(bound) == batch:  # each sequence has its own partition (or there is only one)
            parts = [self._call(one, lists, shared=False) for one, lists in zip(inputs, bound, strict=True)]
        else:  # the batch shares partition and choice, step by step
            steps = [self._call(inputs[:, row].contiguous(), bound[0], shared=True) for row in range(rows)]
            outputs = torch.stack([output for output, _ in steps], dim=1)
            return outputs, torch.stack([picked for _, picked in steps], dim=1) if bound[0].count else None
        outputs = torch.stack([output for output, _ in parts])
        return outputs, torch.stack([picked for _, picked in parts]) if bound[0].count else None

    def _call(self, inputs: torch.Tensor, lists: Lists, shared: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """One call of the kernel, for rows `[rows, hidden_size]`."""
        layer, ffn = self._layer, self._layer.ffn
        gate = ffn.gate
        outputs: tuple[torch.Tensor, torch.Tensor] = torch.ops.stageprune.ffn_decode(
            inputs,
            None if gate is None else gate.weight,
            ffn.up.weight,
            self._down,
            None if gate is None else gate.bias,
            ffn.up.bias,
            ffn.down.bias,
            lists.channels,
            lists.choices,
            lists.count,
            layer.column_norms,
            layer.up_norms if layer.selection == "gate" else None,
            self._act,
            shared,
        )
        return outputs
