"""Probe Pruning: a few tokens of the prompt say which channels it needs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

from stageprune.baselines.base import Attachment, Calibration, refuse_experts
from stageprune.baselines.channels import ChannelBaseline, Kept, SlicedFFN, Texts, best, squares_of_channels
from stageprune.errors import SettingError
from stageprune.families.decoder import Decoder
from stageprune.families.ffn import FFN
from stageprune.methods.base import share
from stageprune.stages import Stage, StageTracker


@dataclass(frozen=True)
class ProbePruning(ChannelBaseline):
    """Chooses FFN channels anew for every prompt, from a probe of its tokens and from history (arXiv 2502.15618).

    In each layer, the rows with the largest norms after the layer's norm (the paper's residual importance) are computed
    on all channels. Their squared activations are fused with those of the calibration, each weighted by itself
    (importance-scaled fusion), and the channels with the largest `||W_down[:, i]^2 * s_i^2||` (PPsp) run the whole
    prompt and all tokens after it. Departures: FFNs alone; the probe is taken per layer from what really enters it, not
    run ahead through the block; padding is in the probe; a batch shares one choice.

    Args:
        probe: share of the prompt's rows in the probe, one at least.
    """

    kind: ClassVar[str] = "probe-pruning"

    probe: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.probe != 1:
            object.__setattr__(self, "probe", share("probe", self.probe))
        if not self.probe:
            raise SettingError("probe must be larger than 0, got 0")

    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """Not before a prompt is seen."""
        raise NotImplementedError("channels are chosen by each prompt")

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        refuse_experts(self, decoder)
        ffns, kept = self.budget(decoder)
        sums = squares_of_channels(ffns, Texts(decoder, calibration)) if calibration else {}
        tokens = sum(map(len, calibration))
        attachment = Attachment()
        for index, ffn in ffns.items():
            if kept[index] < ffn.intermediate_size:
                history = sums[index] / tokens if sums else None
                probed = ProbedFFN(index, ffn, kept[index], self.probe, history, tracker)
                attachment.replace(ffn.module, probed, owner)
                attachment.saved[index] = probed.saved
        return attachment


@dataclass
class ProbedFFN:
    """Stands in for one FFN.

    Attributes:
        index: of its layer.
        ffn: the whole one.
        kept: how many channels run.
        probe: share of the rows that say which.
        history: mean of squared activations over the calibration, `[intermediate_size]`; None without one.
        tracker: knows where a prompt ends.
    """

    index: int
    ffn: FFN
    kept: int
    probe: float
    history: torch.Tensor | None
    tracker: StageTracker
    _column_scores: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._column_scores = self.ffn.down.weight.detach().double().pow(4).sum(0).sqrt()

    @property
    def saved(self) -> int:
        """Weights that a token is not multiplied with."""
        rows = 2 if self.ffn.gate is None else 3
        return rows * int(self.ffn.down.weight.shape[0]) * (self.ffn.intermediate_size - self.kept)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The output; a call outside of any stage is a prompt of its own."""
        stage = self.tracker.current
        if stage is None:
            return self._sliced(hidden_states)(hidden_states)
        rows = hidden_states.reshape(-1, hidden_states.shape[-2], hidden_states.shape[-1])
        sliced = self._remembered(stage, rows)
        return sliced(hidden_states)

    def _remembered(self, stage: Stage, rows: torch.Tensor) -> SlicedFFN:
        """The choice of this sequence, made by the prefill rows of its (last) prompt, or by what there is instead."""
        key = ("probe-pruning", self.index)
        if stage.prefill or key not in stage.memory:
            stage.memory[key] = _Choice(self._sliced(rows[:, : stage.prefill or rows.shape[1]]))
        choice: SlicedFFN = stage.memory[key].ffn
        return choice

    def _sliced(self, rows: torch.Tensor) -> SlicedFFN:
        return SlicedFFN(self.ffn, best(self.scores(rows.flatten(0, -2)), self.kept))

    def scores(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each channel, from the rows of a prompt, `[tokens, hidden_size]`."""
        count = max(math.floor(self.probe * len(rows) + 1e-9), 1)
        probe = rows[best(torch.linalg.vector_norm(rows.double(), dim=-1), count)]
        seen = self.ffn.hidden(probe).double().square().mean(0)
        if self.history is not None:
            total = (seen + self.history).clamp(min=1e-300)
            seen = (seen.square() + self.history.square()) / total
        return self._column_scores * seen


@dataclass
class _Choice:
    """What is remembered beside a K/V cache."""

    ffn: SlicedFFN

    def reorder(self, rows: Any) -> None:
        """All beams share it."""
