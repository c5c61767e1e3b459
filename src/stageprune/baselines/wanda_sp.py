"""Wanda's score for whole FFN channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stageprune.baselines.channels import ChannelBaseline, Kept, Texts, best, squares_of_channels
from stageprune.families.ffn import FFN


@dataclass(frozen=True)
class WandaSp(ChannelBaseline):
    """Keeps the channels with the largest mean of `|W_down[j, i]| * ||X_i||` over outputs j, layer by layer.

    `X_i` is the channel's activation over all calibration tokens. The structured variant of Wanda (arXiv 2306.11695)
    that FLAP (arXiv 2312.11983) compares with. Departures: attention is not pruned; statistics are of the dense model,
    not of layers that were pruned before.
    """

    kind: ClassVar[str] = "wanda-sp"
    needs_calibration: ClassVar[bool] = True

    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """See `ChannelBaseline`."""
        sums = squares_of_channels(ffns, texts)
        scores = {
            index: ffn.down.weight.detach().double().abs().mean(0) * sums[index].sqrt() for index, ffn in ffns.items()
        }
        return {index: Kept(best(scores[index], kept[index])) for index in ffns}
