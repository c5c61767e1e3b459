"""FLAP: fluctuation-based adaptive structured pruning, with a bias that makes up for what is removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, get_args

import torch

from stageprune.baselines.channels import ChannelBaseline, Kept, Texts, best, watch_channels
from stageprune.families.ffn import FFN
from stageprune.methods.base import choice, flag

Structure: TypeAlias = Literal["global", "layer"]


@dataclass(frozen=True)
class FLAP(ChannelBaseline):
    """Removes the channels whose activation fluctuates least, and adds their mean to the output (arXiv 2312.11983).

    A channel's score is the variance of its activation over the calibration tokens times `||W_down[:, i]||^2`. Scores
    are standardised within each layer and compared over all layers (the paper's adaptive structure), and what the
    removed channels give on average, `W_down[:, i] * mean(X_i)`, becomes a bias. Departures: attention heads are not
    pruned; statistics are of the dense model over all tokens.

    Args:
        structure: `"global"`: a layer loses as many channels as its standardised scores say; `"layer"`: all alike.
        compensate: whether to add the bias.
    """

    kind: ClassVar[str] = "flap"
    needs_calibration: ClassVar[bool] = True

    structure: Structure = "global"
    compensate: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        choice("structure", self.structure, get_args(Structure))
        flag("compensate", self.compensate)

    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """See `ChannelBaseline`."""
        moments = {index: _Moments(ffn) for index, ffn in ffns.items()}
        watch_channels(ffns, texts, lambda index, hidden: moments[index].add(hidden))
        scores = {
            index: moments[index].variance * ffn.down.weight.detach().double().square().sum(0)
            for index, ffn in ffns.items()
        }
        counts = _adaptive(scores, sum(kept.values())) if self.structure == "global" else kept
        found = {}
        for index, ffn in ffns.items():
            channels = best(scores[index], counts[index])
            removed = moments[index].mean.index_fill(0, channels, 0)
            bias = ffn.down.weight.detach().double() @ removed if self.compensate else None
            found[index] = Kept(channels, bias)
        return found


def _adaptive(scores: dict[int, torch.Tensor], total: int) -> dict[int, int]:
    """How many channels each layer keeps if the `total` best standardised ones of all layers stay; one at least."""
    standard = {index: (one - one.mean()) / one.std().clamp(min=1e-300) for index, one in scores.items()}
    order = torch.cat([*standard.values()]).sort(descending=True, stable=True).indices[:total]
    layers = torch.cat([torch.full_like(one, index, dtype=torch.long) for index, one in standard.items()])
    return {index: max(int((layers[order] == index).sum()), 1) for index in scores}


class _Moments:
    """Mean and variance of each channel over all tokens seen (Chan's update, stable where means are large)."""

    def __init__(self, ffn: FFN) -> None:
        self.mean = ffn.down.weight.new_zeros(ffn.intermediate_size, dtype=torch.float64).detach()
        self._squares = torch.zeros_like(self.mean)
        self._count = 0

    def add(self, hidden: torch.Tensor) -> None:
        count = len(hidden)
        mean = hidden.mean(0)
        off, total = mean - self.mean, self._count + count
        self._squares += (hidden - mean).square().sum(0) + off.square() * (self._count * count / total)
        self.mean = self.mean + off * (count / total)
        self._count = total

    @property
    def variance(self) -> torch.Tensor:
        return self._squares / max(self._count - 1, 1)
