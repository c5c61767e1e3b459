"""Channel pruning of an image encoder: the prompt's part alone (arXiv 2602.06822, Appendix B).

There is no generation: each image is a prompt that partitions the channels of every FFN, and is itself completed with
those that are kept. The up projection of all channels is computed, as the scores need it; the down projection is not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from stageprune.channels.kernels.base import norms
from stageprune.channels.partition import partition, statistics
from stageprune.channels.sizes import Sizes, check_layers, layer_ratio, sizes_of
from stageprune.errors import SettingError
from stageprune.families.costs import linear_weights
from stageprune.families.ffn import FFN
from stageprune.families.image_encoder import ImageEncoder
from stageprune.methods import OnlineChannelPruning
from stageprune.overrides import MethodOverride

_OF_TOKENS = ("selection", "up_share", "backend", "refresh")
_OF_EXPERTS = ("unseen", "unseen_below", "routing_weights", "shared_experts")


class ImageChannelPruner:
    """Attached to one encoder.

    Attributes:
        layers: the pruned FFNs, by layer index.

    Raises:
        SettingError: if the setting does not fit the model.
        UnsupportedModelError: if a layer's FFN cannot be described.
    """

    def __init__(self, encoder: ImageEncoder, method: OnlineChannelPruning, owner: Any) -> None:
        _check(method, len(encoder.layers))
        self.layers: dict[int, PrunedImageFFN] = {}
        self._overrides: list[MethodOverride] = []
        self._dense = False
        for index, layer in enumerate(encoder.layers):
            if index in method.protect:
                continue
            ffn = encoder.ffn(index)
            inside = linear_weights(ffn.module)
            ratio = layer_ratio(method, index, linear_weights(layer) - inside, inside)
            sizes = sizes_of(ffn.intermediate_size, ratio, method)
            if not sizes.dense:
                self.layers[index] = PrunedImageFFN(ffn, sizes, method)
        for pruned in self.layers.values():
            self._overrides.append(MethodOverride(pruned.ffn.module, "forward", self._guarded(pruned), owner=owner))

    def _guarded(self, pruned: PrunedImageFFN) -> Any:
        def call(forward: Any, hidden_states: torch.Tensor) -> Any:
            return forward(hidden_states) if self._dense else pruned(hidden_states)

        return call

    @contextmanager
    def dense(self) -> Iterator[None]:
        """Inside the block nothing is pruned."""
        before, self._dense = self._dense, True
        try:
            yield
        finally:
            self._dense = before

    def detach(self) -> None:
        """Give the FFNs their own forward back."""
        for override in reversed(self._overrides):
            override.remove()
        self._overrides.clear()


class PrunedImageFFN:
    """Stands in for the forward of one FFN.

    Args:
        ffn: the FFN, without a gate.
        sizes: numbers of channels.
        method: the settings.
    """

    def __init__(self, ffn: FFN, sizes: Sizes, method: OnlineChannelPruning) -> None:
        self.ffn = ffn
        self.sizes = sizes
        self._method = method
        self._column_norms = norms(ffn.down.weight, 0)

    @property
    def kept(self) -> int:
        """Channels that the down projection uses."""
        return self.sizes.computed if self._method.prefill == "candidates" else self.sizes.active

    @property
    def saved_weights(self) -> int:
        """Weights of the down projection that a patch is not multiplied with."""
        return int(self.ffn.down.weight.shape[0]) * (self.sizes.total - self.kept)

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The FFN's output for `[batch, ..., hidden_size]`."""
        hidden, up = self.ffn.hidden_and_up(hidden_states.reshape(hidden_states.shape[0], -1, hidden_states.shape[-1]))
        sums, _ = statistics(hidden, up, None, self._method)
        parts, down = partition(sums, self._column_norms, self.sizes), self.ffn.down
        if len(parts.order) == 1 and self.ffn.plain:
            channels = parts.order[0, : self.kept].sort().values
            outputs = F.linear(hidden[..., channels], down.weight[:, channels], down.bias)
        else:
            outputs = down(hidden.masked_fill(~parts.keep(self.kept), 0))
        return outputs.reshape(*hidden_states.shape[:-1], -1)


def _check(method: OnlineChannelPruning, count: int) -> None:
    default = OnlineChannelPruning()
    for names, what in ((_OF_TOKENS, "generated tokens"), (_OF_EXPERTS, "routed experts")):
        given = [name for name in names if getattr(method, name) != getattr(default, name)]
        if given:
            raise SettingError(
                f"{given[0]}={getattr(method, given[0])!r} is about {what}, and an image encoder has none; leave it out"
            )
    if method.prefill == "dense":
        raise SettingError("prefill='dense' prunes generated tokens alone: nothing of an image encoder")
    check_layers(method, count, "encoder")
