"""The reference among the backends: compute all channels, set those not chosen to zero. No speed-up."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from stageprune.channels.kernels.base import Layer
from stageprune.channels.partition import Partition, ranked


class MaskedBackend:
    """See the module's docstring."""

    name: ClassVar[str] = "masked"
    weight_bytes = 0

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def bind(self, partition: Partition) -> Any:
        """Nothing."""
        return None

    def run(self, inputs: torch.Tensor, partition: Partition, bound: Any) -> torch.Tensor:
        """See `Backend.run`."""
        ffn, norms, up_norms = self._layer.ffn, self._layer.column_norms, self._layer.up_norms
        if ffn.gate is not None and up_norms is not None:
            gated = ffn.act(ffn.gate(inputs))
            keep = self._keep(gated, norms * up_norms, partition)
            hidden = gated * ffn.up(inputs)
        else:
            hidden = ffn.hidden(inputs)
            keep = self._keep(hidden, norms, partition)
        return ffn.down(hidden.masked_fill(~keep, 0))

    def _keep(self, values: torch.Tensor, weights: torch.Tensor, partition: Partition) -> torch.Tensor:
        """The mask of active channels, `[groups, rows or 1, h]`."""
        if self._layer.selection == "fixed":
            return partition.keep(partition.sizes.active)
        channels, count, keep = choices(self._layer.selection, partition)
        scores = channel_scores(values, weights, groups=len(partition.order))
        candidates = channels[:, None].expand(-1, scores.shape[1], -1)
        best = ranked(scores.gather(-1, candidates))[..., :count]
        return keep.expand(-1, scores.shape[1], -1).scatter(-1, candidates.gather(-1, best), True)


def choices(selection: str, partition: Partition) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Among which channels a token chooses `[groups, n]`, how many, and those active anyway `[groups, 1, h]`."""
    sizes = partition.sizes
    if selection == "partition":
        return partition.computed.gather(1, partition.candidates), sizes.picked, partition.keep(sizes.retained)
    if selection == "full":
        return partition.order.sort(1).values, sizes.active, partition.keep(0)
    return partition.computed, sizes.active, partition.keep(0)


def channel_scores(values: torch.Tensor, weights: torch.Tensor, groups: int) -> torch.Tensor:
    """Scores of each token's channels, `[groups, rows, h]`: Eq. 3, the norm over the batch where it shares a choice."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    sizes = values.to(dtype).abs()
    if groups < values.shape[0]:
        sizes = sizes.square().sum(0, keepdim=True).sqrt()
    return sizes * weights.to(dtype)
