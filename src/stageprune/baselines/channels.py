"""FFNs with fewer channels for all tokens: what the baselines that prune channels have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stageprune.baselines.base import Attachment, Baseline, Calibration, refuse_experts
from stageprune.baselines.calibration import watch_inputs
from stageprune.channels.sizes import mlp_ratio_of
from stageprune.errors import SettingError
from stageprune.families.costs import linear_weights
from stageprune.families.decoder import Decoder
from stageprune.families.ffn import FFN, Projection, describe_ffn
from stageprune.methods.base import layer_indices, share
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
        if isinstance(self.protect, (str, bytes)) or not isinstance(self.protect, Sequence):
            raise SettingError(f"protect must list layer indices, got {type(self.protect).__name__}")
        object.__setattr__(self, "protect", layer_indices("protect", self.protect))

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
        outside = [index for index in self.protect if index >= len(decoder.layers)]
        if outside:
            raise SettingError(f"protect names layer {outside[0]}, but the model has {len(decoder.layers)} layers")
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


class SlicedFFN:
    """An FFN's forward with some of its channels.

    Args:
        ffn: the whole one.
        channels: that stay.
        bias: added to the output, `[hidden_size]`.
    """

    def __init__(self, ffn: FFN, channels: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._ffn = ffn
        self._gate = None if ffn.gate is None else _rows(ffn.gate, channels)
        self._up = _rows(ffn.up, channels)
        self._down = ffn.down.weight.detach()[:, channels].contiguous()
        own = ffn.down.bias
        self._bias = own if bias is None else bias.to(self._down.dtype) + (0 if own is None else own.detach())

    @property
    def weights(self) -> int:
        """That a token is multiplied with."""
        return sum(weight.numel() for weight in self._weights())

    @property
    def weight_bytes(self) -> int:
        """Of the copies."""
        return sum(weight.nbytes for weight in self._weights())

    def hidden(self, inputs: torch.Tensor) -> torch.Tensor:
        """The input of the down projection, `[..., channels]`."""
        up = F.linear(inputs, *self._up)
        if self._gate is None:
            return self._ffn.act(up)
        up = up if self._ffn.up_act is None else self._ffn.up_act(up)
        return self._ffn.act(F.linear(inputs, *self._gate)) * up

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """The output, `[..., hidden_size]`."""
        return F.linear(self.hidden(inputs), self._down, self._bias)

    def _weights(self) -> list[torch.Tensor]:
        return [self._up[0], self._down, *([] if self._gate is None else [self._gate[0]])]


def best(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The positions of the `count` largest scores, ascending; equal ones: the first."""
    return scores.sort(descending=True, stable=True).indices[:count].sort().values


def _rows(projection: Projection, channels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    bias = projection.bias
    return projection.weight.detach()[channels].contiguous(), None if bias is None else bias.detach()[channels]


def _kept(method: ChannelBaseline, layer: nn.Module, ffn: FFN) -> int:
    inside = linear_weights(ffn.module)
    ratio = method.mlp_ratio
    if ratio is None:
        ratio = mlp_ratio_of(method.ratio, linear_weights(layer) - inside, inside)
    return max(round((1 - ratio) * ffn.intermediate_size), 1)
