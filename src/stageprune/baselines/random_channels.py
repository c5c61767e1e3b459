"""Random pruning of FFN channels: what a criterion has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from stageprune.baselines.channels import ChannelBaseline, Kept, Texts
from stageprune.families.ffn import FFN
from stageprune.methods.base import count


@dataclass(frozen=True)
class RandomChannels(ChannelBaseline):
    """Keeps random channels, in each layer others.

    Args:
        seed: of the choice.
    """

    kind: ClassVar[str] = "random-channels"

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        count("seed", self.seed, least=0)

    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """See `ChannelBaseline`."""
        generator = torch.Generator().manual_seed(self.seed)
        found = {}
        for index, ffn in ffns.items():
            order = torch.randperm(ffn.intermediate_size, generator=generator)
            found[index] = Kept(order[: kept[index]].sort().values.to(ffn.down.weight.device))
        return found
