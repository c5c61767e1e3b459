"""Scores, ranking, and the partition of a layer's channels (arXiv 2602.06822, sections 3.3 and 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from stageprune.channels.sizes import Sizes
from stageprune.methods import OnlineChannelPruning

_BLOCK = 512  # rows whose squares are summed at once: bounds the float32 copy of low-precision activations


@dataclass(frozen=True)
class Partition:
    """A layer's channels as the prompt ranked them, for `groups` sequences (1 where the batch shares one).

    Attributes:
        sizes: of the sets.
        order: all channels, best first, `[groups, h]`.
        computed: retained and candidate channels in ascending order, `[groups, |R| + |C|]`.
        candidates: where in `computed` the candidates are, ascending, `[groups, |C|]`.
        up_sizes: L2 norm of each channel's up projection over the prompt, `[groups, h]`; None unless asked for.
    """

    sizes: Sizes
    order: torch.Tensor
    computed: torch.Tensor
    candidates: torch.Tensor
    up_sizes: torch.Tensor | None = None

    def keep(self, count: int) -> torch.Tensor:
        """A mask of the best `count` channels, `[groups, 1, h]`."""
        mask = torch.zeros(self.order.shape, dtype=torch.bool, device=self.order.device)
        return mask.scatter_(1, self.order[:, :count], True)[:, None]


def squares(hidden: torch.Tensor, real: torch.Tensor | None) -> torch.Tensor:
    """Sum of squares of each channel over a sequence's real tokens, `[batch, h]`, in float32 or better.

    Args:
        hidden: input of the down projection, `[batch, length, h]`.
        real: false at padding, `[batch, length]`; None if there is none.
    """
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    total = torch.zeros(hidden.shape[0], hidden.shape[2], dtype=dtype, device=hidden.device)
    for start in range(0, hidden.shape[1], _BLOCK):
        block = hidden[:, start : start + _BLOCK].to(dtype)
        if real is not None:
            block = block.masked_fill(~real[:, start : start + _BLOCK, None], 0)
        total += block.square().sum(1)
    return total


def statistics(
    hidden: torch.Tensor, up: torch.Tensor, real: torch.Tensor | None, method: OnlineChannelPruning
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums of squares that a partition is made of, `[groups, h]`, and those of the up projections where needed.

    Args:
        hidden: input of the down projection, `[batch, length, h]`.
        up: output of the up projection, likewise.
        real: false at padding, `[batch, length]`; None if there is none.
        method: the settings.
    """
    sums = squares(hidden, real)
    up_sums = squares(up, real) if method.selection == "cascade" else None
    if method.scope == "batch":
        sums = sums.sum(0, keepdim=True)
        up_sums = None if up_sums is None else up_sums.sum(0, keepdim=True)
    return sums, up_sums


def partition(
    sums: torch.Tensor, column_norms: torch.Tensor, sizes: Sizes, up_sums: torch.Tensor | None = None
) -> Partition:
    """Rank channels by `||W_down[:, i]|| * ||H[..., i]||` (Eq. 3) and split them.

    Args:
        sums: of squared activations, `[groups, h]`.
        column_norms: of the down projection, `[h]`.
        sizes: of the sets.
        up_sums: of squared up projections, `[groups, h]`, where the selection goes by them.
    """
    order = ranked(column_norms.to(sums.dtype) * sums.sqrt())
    computed, places = order[:, : sizes.computed].sort(dim=1)
    candidates = (places >= sizes.retained).nonzero()[:, 1].view(order.shape[0], sizes.candidates)
    return Partition(sizes, order, computed, candidates, None if up_sums is None else up_sums.sqrt())


def ranked(scores: torch.Tensor) -> torch.Tensor:
    """Positions by descending score along the last axis; ties by position; NaN first, so that it is never lost."""
    return scores.sort(dim=-1, descending=True, stable=True).indices
