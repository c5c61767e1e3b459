"""ShortGPT: drop the layers that change their input least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from stageprune.baselines.base import Attachment, Baseline, Calibration
from stageprune.baselines.calibration import run_hooked
from stageprune.baselines.layer_dropping import drop
from stageprune.families.decoder import Decoder
from stageprune.methods.base import share
from stageprune.stages import StageTracker


@dataclass(frozen=True)
class ShortGPT(Baseline):
    """Drops the layers with the least block influence (arXiv 2403.03853).

    `BI = 1 - mean(cos(X_in, X_out))` over all calibration tokens, with the hidden states before and after the layer
    (the paper's Eq. 1). Equal ones: the deeper.

    Args:
        ratio: share of the layers; the count is `floor(ratio * num_hidden_layers)`.
    """

    kind: ClassVar[str] = "shortgpt"
    needs_calibration: ClassVar[bool] = True

    ratio: float = 0.25

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        influence = block_influence(decoder, calibration)
        count = int(self.ratio * len(decoder.layers) + 1e-9)
        least = sorted(range(len(influence)), key=lambda index: (influence[index], -index))[:count]
        return drop(decoder, sorted(least), owner)


def block_influence(decoder: Decoder, calibration: Calibration) -> list[float]:
    """Of each layer, in order."""
    sums = [0.0] * len(decoder.layers)
    tokens = sum(map(len, calibration))

    def watch(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            before = (args[0] if args else kwargs["hidden_states"]).double()
            after = (output[0] if isinstance(output, tuple) else output).double()
            sums[index] += float(torch.cosine_similarity(before, after, dim=-1).sum())

        return hook

    layers = enumerate(decoder.layers)
    run_hooked(decoder, calibration, [one.register_forward_hook(watch(i), with_kwargs=True) for i, one in layers])
    return [1 - total / tokens for total in sums]
