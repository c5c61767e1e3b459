"""How the generated tokens' channels relate to the prompt's ranking (arXiv 2602.06822, Figure 2).

Watching a layer computes all its channels for each generated token beside what the layer itself does, so it is slow and
changes nothing; it is off unless `handle.observe()` is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stageprune.channels.kernels.base import Layer
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.partition import Partition, ranked
from stageprune.channels.sizes import Sizes
from stageprune.methods.online_channels import Selection

HEAT_BINS = 64
"""Channels are averaged into this many equal stretches of the prompt's ranking for the heat map."""


@dataclass(frozen=True)
class Observed:
    """One layer, over the generated tokens that were watched.

    Attributes:
        tokens: how many.
        turnover: share of a token's own choice (the K picked candidates, or all active channels where all are chosen
            anew) that the token before did not have, mean; None for a single token, or where nothing is chosen.
        overlap: share of a token's own best half of the channels that is in the prompt's best half, per token.
        rank_difference: mean distance of a channel's rank from its rank in the prompt, over h, per token.
        ranks: mean rank over h of each stretch of the prompt's ranking, per token; `[tokens][HEAT_BINS]`.
    """

    tokens: int
    turnover: float | None
    overlap: tuple[float, ...]
    rank_difference: tuple[float, ...]
    ranks: tuple[tuple[float, ...], ...]

    @property
    def mean_overlap(self) -> float:
        """Over the tokens."""
        return sum(self.overlap) / self.tokens


@dataclass
class Observer:
    """Collects what one layer's generated tokens show; sequences of a batch are averaged."""

    layer: Layer
    _overlap: list[float] = field(default_factory=list)
    _difference: list[float] = field(default_factory=list)
    _ranks: list[tuple[float, ...]] = field(default_factory=list)
    _turnover: list[float] = field(default_factory=list)
    _active: torch.Tensor | None = None

    def see(self, inputs: torch.Tensor, partition: Partition) -> None:
        """Take in the rows of one pass: `inputs` `[batch, rows, hidden_size]`, which have this partition."""
        scores, active = MaskedBackend(self.layer).scores_and_active(inputs, partition)
        for row in range(inputs.shape[1]):
            self._see(scores[:, row], active[:, min(row, active.shape[1] - 1)], partition)

    def _see(self, scores: torch.Tensor, active: torch.Tensor, partition: Partition) -> None:
        total, order = scores.shape[-1], partition.order
        own = ranked(scores)
        half = max(total // 2, 1)
        in_prompt = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order[:, :half], True)
        self._overlap.append(float(in_prompt.gather(1, own[:, :half]).float().mean()))
        ranks = own.argsort(1).gather(1, order).float()  # in the order of the prompt's ranking
        expected = torch.arange(total, device=scores.device, dtype=torch.float32)
        self._difference.append(float((ranks - expected).abs().mean()) / total)
        bins = torch.tensor_split(ranks.mean(0) / total, min(HEAT_BINS, total))
        self._ranks.append(tuple(float(part.mean()) for part in bins))
        choices = chosen_anew(self.layer.selection, partition.sizes)
        if choices and self._active is not None and self._active.shape == active.shape:
            new = (active & ~self._active).sum(1) / choices
            self._turnover.append(float(new.float().mean()))
        self._active = active

    def result(self) -> Observed | None:
        """What was seen; None if no generated token went through the layer's partition."""
        if not self._overlap:
            return None
        turnover = sum(self._turnover) / len(self._turnover) if self._turnover else None
        return Observed(len(self._overlap), turnover, tuple(self._overlap), tuple(self._difference), tuple(self._ranks))


def chosen_anew(selection: Selection, sizes: Sizes) -> int:
    """How many channels each token chooses for itself."""
    return {"partition": sizes.picked, "fixed": 0}.get(selection, sizes.active)


def mean_by_token(observed: Sequence[Observed]) -> tuple[list[float], list[float]]:
    """Overlap and rank difference of each generated token, averaged over layers."""
    tokens = min(layer.tokens for layer in observed)
    overlap = [sum(layer.overlap[step] for layer in observed) / len(observed) for step in range(tokens)]
    difference = [sum(layer.rank_difference[step] for layer in observed) / len(observed) for step in range(tokens)]
    return overlap, difference
