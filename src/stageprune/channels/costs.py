"""What one generated token costs in an FFN whose channels are pruned: weights read and floating-point operations.

A channel is a row of `hidden_size` weights in each projection, so everything is a count of rows times `hidden_size`.
Decoding few sequences takes the time of reading weights: the ideal speed-up is the ratio of rows. The same ratio holds
for floating-point operations, two for each weight (digest section 4.4 of arXiv 2602.06822).
"""

from __future__ import annotations

from dataclasses import dataclass

from stageprune.channels.sizes import Sizes
from stageprune.methods.online_channels import Selection


@dataclass(frozen=True)
class FFNCost:
    """One FFN, for one generated token.

    Attributes:
        hidden_size: d, weights of a channel in one projection.
        gate: channels whose gate projection is computed; 0 where there is no gate.
        up: channels whose up projection is computed.
        down: channels that enter the down projection.
    """

    hidden_size: int
    gate: int
    up: int
    down: int

    @property
    def weights(self) -> int:
        """Weights that are read."""
        return self.hidden_size * (self.gate + self.up + self.down)

    @property
    def flops(self) -> int:
        """Floating-point operations, a multiply-add counted as two."""
        return 2 * self.weights


def dense_cost(hidden_size: int, intermediate_size: int, gated: bool = True) -> FFNCost:
    """Of the untouched FFN: 6dh operations where it is gated."""
    return FFNCost(hidden_size, intermediate_size if gated else 0, intermediate_size, intermediate_size)


def pruned_cost(hidden_size: int, sizes: Sizes, selection: Selection, gated: bool = True) -> FFNCost:
    """Of the pruned FFN.

    `partition`: 4d(1-r+delta)h + 2d(1-r)h; `fixed`: 6d(1-r)h; `full`: 4dh + 2d(1-r)h; `gate` and `cascade`: the gate of
    the channels that are not pruned, the up projection of fewer.
    """
    gate = sizes.computed if selection in ("gate", "cascade") else sizes.up
    return FFNCost(hidden_size, gate if gated else 0, sizes.up, sizes.active)


def scoring_flops(hidden_size: int, sizes: Sizes, selection: Selection, gated: bool = True) -> int:
    """Operations of one token for all channels that it scores, as Table 6 of the paper counts its overhead.

    That counts the gate and up projections of a scored channel whether or not it is chosen: 4d * |C| for `partition`,
    4dh for `full`, none for `fixed`.
    """
    if selection in ("gate", "cascade"):
        return 2 * hidden_size * (sizes.computed + (sizes.up if selection == "cascade" else 0))
    scored = {"partition": sizes.candidates, "fixed": 0, "full": sizes.total}[selection]
    return 2 * hidden_size * scored * (2 if gated else 1)
