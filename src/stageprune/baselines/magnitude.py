"""Magnitude pruning of FFN channels: by weights alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from stageprune.baselines.channels import ChannelBaseline, Kept, Texts, best
from stageprune.channels.kernels.base import norms
from stageprune.families.ffn import FFN


@dataclass(frozen=True)
class Magnitude(ChannelBaseline):
    """Keeps the channels with the largest columns of the down projection, `||W_down[:, i]||` (L2), layer by layer.

    The oldest criterion (Han et al. 2015, arXiv 1506.02626, there for single weights), for whole channels.
    """

    kind: ClassVar[str] = "magnitude"

    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """See `ChannelBaseline`."""
        return {index: Kept(best(norms(ffn.down.weight, 0), kept[index])) for index, ffn in ffns.items()}
