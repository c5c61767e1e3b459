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

    def bound_bytes(self, bound: Any) -> int:
        """None."""
        return 0

    def run(self, inputs: torch.Tensor, partition: Partition, bound: Any) -> torch.Tensor:
        """See `Backend.run`."""
        hidden, keep = self.hidden_and_active(inputs, partition)
        return self._layer.ffn.down(hidden.masked_fill(~keep, 0))

    def scores_and_active(self, inputs: torch.Tensor, partition: Partition) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each row, for all channels: Eq. 3, whatever the selection goes by, and the mask of the active ones.

        Returns:
            `[groups, rows, h]` and `[groups, rows or 1, h]`.
        """
        hidden, keep = self.hidden_and_active(inputs, partition)
        return channel_scores(hidden, self._layer.column_norms, groups=len(partition.order)), keep

    def hidden_and_active(self, inputs: torch.Tensor, partition: Partition) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of the down projection for all channels, and the mask of the active ones."""
        ffn, selection, norms = self._layer.ffn, self._layer.selection, self._layer.column_norms
        if selection == "fixed":
            return ffn.hidden(inputs), partition.keep(partition.sizes.active)
        if selection in ("partition", "full"):
            hidden = ffn.hidden(inputs)
            return hidden, _keep(hidden, norms, partition, *choices(selection, partition))
        gated, up = ffn.gated_and_up(inputs)
        hidden = gated * up
        up_sizes = self._layer.up_norms if partition.up_sizes is None else partition.up_sizes[:, None]
        assert up_sizes is not None
        sizes = partition.sizes
        keep = _keep(gated, norms * up_sizes, partition, partition.computed, sizes.up, partition.keep(0))
        if selection == "cascade":
            scores = channel_scores(hidden, norms, groups=len(partition.order)).masked_fill(~keep, -1)
            keep = torch.zeros_like(keep).scatter_(-1, ranked(scores)[..., : sizes.active], True)
        return hidden, keep


def _keep(
    values: torch.Tensor,
    weights: torch.Tensor,
    partition: Partition,
    channels: torch.Tensor,
    count: int,
    always: torch.Tensor,
) -> torch.Tensor:
    """The mask of the best `count` of these channels and those active anyway, `[groups, rows, h]`."""
    scores = channel_scores(values, weights, groups=len(partition.order))
    candidates = channels[:, None].expand(-1, scores.shape[1], -1)
    best = ranked(scores.gather(-1, candidates))[..., :count]
    return always.expand(-1, scores.shape[1], -1).scatter(-1, candidates.gather(-1, best), True)


def choices(selection: str, partition: Partition) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Among which channels a token chooses `[groups, n]`, how many, and those active anyway `[groups, 1, h]`."""
    sizes = partition.sizes
    if selection == "partition":
        return partition.computed.gather(1, partition.candidates), sizes.picked, partition.keep(sizes.retained)
    return partition.order.sort(1).values, sizes.active, partition.keep(0)


def channel_scores(values: torch.Tensor, weights: torch.Tensor, groups: int) -> torch.Tensor:
    """Scores of each token's channels, `[groups, rows, h]`: Eq. 3, the norm over the batch where it shares a choice."""
    dtype = torch.promote_types(values.dtype, torch.float32)
    sizes = values.to(dtype).abs()
    if groups < values.shape[0]:
        sizes = sizes.square().sum(0, keepdim=True).sqrt()
    return sizes * weights.to(dtype)
