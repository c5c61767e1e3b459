"""What a handle does to its model, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stageprune.channels.pruner import ChannelPruner
from stageprune.channels.sizes import Sizes
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import Decoder
from stageprune.methods import Method
from stageprune.prefill.skip import PrefillPruner


@dataclass(frozen=True)
class ChannelReport:
    """One FFN with pruned channels.

    Attributes:
        layer: index of the decoder layer.
        sizes: how many channels are retained, candidates and active.
        backend: what runs it for generated tokens.
    """

    layer: int
    sizes: Sizes
    backend: str


@dataclass(frozen=True)
class Report:
    """What is pruned, and what it saves.

    Attributes:
        model: the class of the model.
        methods: the settings in force.
        num_hidden_layers: of the model.
        skipped_layers: layers that the prompt skips, zero-based.
        prompt_length: tokens of the prompt that the figures are for.
        dense_flops: floating-point operations up to the first token, of the untouched model.
        pruned_flops: likewise, pruned.
        channels: of each FFN whose channels are pruned.
        extra_weight_bytes: memory that pruning adds to the weights.
    """

    model: str
    methods: tuple[dict[str, Any], ...]
    num_hidden_layers: int
    skipped_layers: tuple[int, ...]
    prompt_length: int
    dense_flops: int
    pruned_flops: int
    channels: tuple[ChannelReport, ...]
    extra_weight_bytes: int

    @property
    def ideal_speedup(self) -> float:
        """Of the time to the first token, if time went by floating-point operations alone."""
        return self.dense_flops / self.pruned_flops

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "ideal_speedup": self.ideal_speedup}

    def __str__(self) -> str:
        lines = []
        if self.skipped_layers or not self.channels:
            lines += self._prefill_lines()
        if self.channels:
            lines.append(self._channel_line())
        return "\n".join([*lines, f"extra weight memory: {self.extra_weight_bytes:,} bytes"])

    def _prefill_lines(self) -> list[str]:
        skipped = ", ".join(map(str, self.skipped_layers)) or "none"
        count = f"{len(self.skipped_layers)} of {self.num_hidden_layers}"
        return [
            f"{self.model}: the prompt skips {count} layers ({skipped})",
            f"prompt of {self.prompt_length} tokens: {self.dense_flops / 1e9:.1f} GFLOP dense, "
            f"{self.pruned_flops / 1e9:.1f} GFLOP pruned, ideal speed-up {self.ideal_speedup:.2f}x",
        ]

    def _channel_line(self) -> str:
        first = self.channels[0]
        sizes, backends = first.sizes, ", ".join(sorted({part.backend for part in self.channels}))
        return (
            f"channels of {len(self.channels)} FFNs pruned ({backends}); layer {first.layer}: {sizes.retained} "
            f"retained, {sizes.candidates} candidates, {sizes.pruned} pruned, {sizes.picked} picked by each token"
        )


def make_report(
    decoder: Decoder,
    methods: Sequence[Method],
    prefill: PrefillPruner | None,
    channels: ChannelPruner | None,
    prompt_length: int,
) -> Report:
    """Collect the figures; see `Report`."""
    return Report(
        model=type(decoder.model).__name__,
        methods=tuple(method.to_dict() for method in methods),
        num_hidden_layers=len(decoder.layers),
        skipped_layers=prefill.skipped if prefill else (),
        prompt_length=prompt_length,
        dense_flops=prompt_flops(decoder, prompt_length),
        pruned_flops=prompt_flops(decoder, prompt_length, prefill.context_free if prefill else ()),
        channels=tuple(
            ChannelReport(index, layer.sizes, layer.backend.name) for index, layer in channels.layers.items()
        )
        if channels
        else (),
        extra_weight_bytes=channels.weight_bytes if channels else 0,
    )
