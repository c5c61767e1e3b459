"""FFNs with fewer channels for all tokens: what the baselines that prune channels have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from stageprune.baselines.base import Attachment, Baseline, Calibration, refuse_experts
from stageprune.baselines.calibration import watch_inputs
from stageprune.channels.sizes import check_protected, mlp_ratio_of
from stageprune.families.costs import linear_weights
from stageprune.families.decoder import Decoder
from stageprune.families.ffn import FFN, Projection, describe_ffn
from stageprune.methods.base import layer_list, share
from stageprune.stages import StageTracker


@dataclass(frozen=True)
class ChannelBaseline(Baseline):
    """A baseline that removes FFN channels, the same ones for every token.

    Args:
        ratio: share of the attention and FFN parameters that is removed, all of it from the FFN, as in
            `OnlineChannelPruning`.
        mlp_ratio: sets the share of the FFN's channels directly; overrides `ratio`.
        protect: layers that stay dense.
    """

    ratio: float = 0.2
    mlp_ratio: float | None = None
    protect: Sequence[int] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))
        if self.mlp_ratio is not None:
            object.__setattr__(self, "mlp_ratio", share("mlp_ratio", self.mlp_ratio))
        object.__setattr__(self, "protect", layer_list("protect", self.protect))

    @abstractmethod
    def choose(self, ffns: dict[int, FFN], kept: dict[int, int], texts: Texts) -> dict[int, Kept]:
        """The channels that stay, by layer.

        Args:
            ffns: to prune, by layer.
            kept: how many channels each may keep; their sum is the budget.
            texts: to calibrate on.
        """

    def attach(self, decoder: Decoder, tracker: StageTracker, calibration: Calibration, owner: Any) -> Attachment:
        """See `Baseline`."""
        refuse_experts(self, decoder)
        ffns, kept = self.budget(decoder)
        channels = self.choose(ffns, kept, Texts(decoder, calibration))
        attachment = Attachment()
        for index, ffn in ffns.items():
            if len(channels[index].channels) == ffn.intermediate_size:
                continue
            sliced = SlicedFFN(ffn, channels[index].channels, channels[index].bias)
            attachment.replace(ffn.module, sliced, owner)
            attachment.saved[index] = linear_weights(ffn.module) - sliced.weights
            attachment.weight_bytes += sliced.weight_bytes
        return attachment

    def budget(self, decoder: Decoder) -> tuple[dict[int, FFN], dict[int, int]]:
        """The FFNs to prune, and how many channels each may keep, by layer."""
        check_protected(self.protect, len(decoder.layers), "model")
        ffns, kept = {}, {}
        for index, layer in enumerate(decoder.layers):
            if index not in self.protect:
                ffns[index] = describe_ffn(index, layer)
                kept[index] = _kept(self, layer, ffns[index])
        return ffns, kept


@dataclass(frozen=True)
class Kept:
    """What is left of one FFN.

    Attributes:
        channels: that stay, ascending.
        bias: added to the output, `[hidden_size]`; None for none.
    """

    channels: torch.Tensor
    bias: torch.Tensor | None = None


@dataclass(frozen=True)
class Texts:
    """The calibration, and the model that it is run through."""

    decoder: Decoder
    calibration: Calibration


def watch_channels(ffns: dict[int, FFN], texts: Texts, see: Callable[[int, torch.Tensor], None]) -> None:
    """Tell `see` each FFN's layer and the input of its down projection, `[tokens, intermediate_size]` in float64."""
    watchers = {
        ffn.module: lambda inputs, index=index, ffn=ffn: see(index, ffn.hidden(inputs).double())
        for index, ffn in ffns.items()
    }
    watch_inputs(texts.decoder, texts.calibration, watchers)


def squares_of_channels(ffns: dict[int, FFN], texts: Texts) -> dict[int, torch.Tensor]:
    """Sums of squared activations over all calibration tokens, `[intermediate_size]` in float64, by layer."""
    sums = {index: ffn.down.weight.new_zeros(ffn.intermediate_size, dtype=torch.float64) for index, ffn in ffns.items()}

    def see(index: int, hidden: torch.Tensor) -> None:
        sums[index] += hidden.square().sum(0)

    watch_channels(ffns, texts, see)
    return sums


class SlicedFFN:
    """An FFN's forward with some of its channels.

    Args:
        ffn: the whole one.
        channels: that stay.
        bias: added to the output, `[hidden_size]`.
    """

    def __init__(self, ffn: FFN, channels: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        own = ffn.down.bias
        if bias is not None:
            own = bias.to(ffn.down.weight.dtype) + (0 if own is None else own)
        gate = None if ffn.gate is None else _rows(ffn.gate, channels)
        down = _linear(ffn.down.weight[:, channels], own)
        self._ffn = replace(ffn, gate=gate, up=_rows(ffn.up, channels), down=down)

    @property
    def weights(self) -> int:
        """That a token is multiplied with."""
        return sum(weight.numel() for weight in self._weights())

    @property
    def weight_bytes(self) -> int:
        """Of the copies."""
        return sum(weight.nbytes for weight in self._weights())

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The output, `[..., hidden_size]`."""
        return self._ffn.down(self._ffn.hidden(inputs))

    def _weights(self) -> list[torch.Tensor]:
        parts = (self._ffn.gate, self._ffn.up, self._ffn.down)
        return [part.weight for part in parts if part is not None]


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The positions of the `count` largest scores, ascending; equal ones: the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _rows(projection: Projection, channels: torch.Tensor) -> Projection:
    bias = projection.bias
    return _linear(projection.weight[channels], None if bias is None else bias[channels])


def _linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Projection:
    """Of these weights, without allocating others first."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    linear.weight = nn.Parameter(weight.detach().contiguous(), requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach(), requires_grad=False)
    return Projection(linear)


def _kept(method: ChannelBaseline, layer: nn.Module, ffn: FFN) -> int:
    inside = linear_weights(ffn.module)
    ratio = method.mlp_ratio
    if ratio is None:
        ratio = mlp_ratio_of(method.ratio, linear_weights(layer) - inside, inside)
    return max(round((1 - ratio) * ffn.intermediate_size), 1)
