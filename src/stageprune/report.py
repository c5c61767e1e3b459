"""What a handle does to its model, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stageprune.channels.observe import Observed
from stageprune.channels.pruner import ChannelPruner
from stageprune.channels.sizes import Sizes
from stageprune.families.costs import prompt_flops, values_of_a_step
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
        dense_weights: that a generated token reads in the untouched FFN.
        weights: likewise, pruned.
        observed: how tokens chose, if `handle.observe()` watched any.
    """

    layer: int
    sizes: Sizes
    backend: str
    dense_weights: int
    weights: int
    observed: Observed | None


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
        dense_step_values: weights and cached values read to generate one token after the prompt, for one sequence.
        pruned_step_values: likewise, pruned.
        channels: of each FFN whose channels are pruned.
        extra_weight_bytes: memory that pruning adds to the weights.
        preparation_s: what the last prompt's partitions, and what backends keep for them, took, in seconds; None if
            there was none.
        preparation_bytes: what backends keep for the last prompt, such as copies of weights.
    """

    model: str
    methods: tuple[dict[str, Any], ...]
    num_hidden_layers: int
    skipped_layers: tuple[int, ...]
    prompt_length: int
    dense_flops: int
    pruned_flops: int
    dense_step_values: int
    pruned_step_values: int
    channels: tuple[ChannelReport, ...]
    extra_weight_bytes: int
    preparation_s: float | None
    preparation_bytes: int

    @property
    def backends(self) -> tuple[str, ...]:
        """What runs pruned FFNs, in alphabetical order."""
        return tuple(sorted({part.backend for part in self.channels}))

    @property
    def ideal_speedup(self) -> float:
        """Of the time to the first token, if time went by floating-point operations alone."""
        return self.dense_flops / self.pruned_flops

    @property
    def ideal_decode_speedup(self) -> float:
        """Of generation, if time went by reading weights and cached values alone."""
        return self.dense_step_values / self.pruned_step_values

    @property
    def ideal_ffn_speedup(self) -> float:
        """Of the pruned FFNs in generation, likewise; 1 where no channels are pruned."""
        dense, pruned = (sum(getattr(part, name) for part in self.channels) for name in ("dense_weights", "weights"))
        return dense / pruned if pruned else 1.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            **asdict(self),
            "ideal_speedup": self.ideal_speedup,
            "ideal_decode_speedup": self.ideal_decode_speedup,
            "ideal_ffn_speedup": self.ideal_ffn_speedup,
        }

    def __str__(self) -> str:
        lines = []
        if self.skipped_layers or not self.channels:
            lines += self._prefill_lines()
        if self.channels:
            lines += self._channel_lines()
        return "\n".join([*lines, f"extra weight memory: {self.extra_weight_bytes:,} bytes"])

    def _prefill_lines(self) -> list[str]:
        skipped = ", ".join(map(str, self.skipped_layers)) or "none"
        count = f"{len(self.skipped_layers)} of {self.num_hidden_layers}"
        return [
            f"{self.model}: the prompt skips {count} layers ({skipped})",
            f"prompt of {self.prompt_length} tokens: {self.dense_flops / 1e9:.1f} GFLOP dense, "
            f"{self.pruned_flops / 1e9:.1f} GFLOP pruned, ideal speed-up {self.ideal_speedup:.2f}x",
        ]

    def _channel_lines(self) -> list[str]:
        backends = ", ".join(self.backends)
        lines = [
            f"{self.model}: channels of {len(self.channels)} of {self.num_hidden_layers} FFNs pruned ({backends}); a "
            f"generated token reads {1 / self.ideal_ffn_speedup:.0%} of their weights, ideal speed-up "
            f"{self.ideal_ffn_speedup:.2f}x of the FFNs, {self.ideal_decode_speedup:.2f}x of the whole step after "
            f"{self.prompt_length} tokens",
            "layer  retained candidates  pruned  picked  turnover  overlap",
        ]
        for part in self.channels:
            sizes, seen = part.sizes, part.observed
            turnover = "-" if seen is None or seen.turnover is None else f"{seen.turnover:.1%}"
            overlap = "-" if seen is None else f"{seen.mean_overlap:.1%}"
            lines.append(
                f"{part.layer:>5} {sizes.retained:>9} {sizes.candidates:>10} {sizes.pruned:>7} {sizes.picked:>7} "
                f"{turnover:>9} {overlap:>8}"
            )
        return lines


def make_report(
    decoder: Decoder,
    methods: Sequence[Method],
    prefill: PrefillPruner | None,
    channels: ChannelPruner | None,
    prompt_length: int,
) -> Report:
    """Collect the figures; see `Report`."""
    layers = channels.layers if channels else {}
    parts = tuple(
        ChannelReport(
            index, layer.sizes, layer.backend.name, layer.dense_cost.weights, layer.cost.weights, layer.observed
        )
        for index, layer in layers.items()
    )
    skipped = prefill.context_free if prefill else ()
    saved = sum(layer.prompt_saving for index, layer in layers.items() if index not in skipped)
    step = values_of_a_step(decoder, prompt_length)
    return Report(
        model=type(decoder.model).__name__,
        methods=tuple(method.to_dict() for method in methods),
        num_hidden_layers=len(decoder.layers),
        skipped_layers=prefill.skipped if prefill else (),
        prompt_length=prompt_length,
        dense_flops=prompt_flops(decoder, prompt_length),
        pruned_flops=prompt_flops(decoder, prompt_length, skipped) - 2 * (prompt_length - 1) * saved,
        dense_step_values=step,
        pruned_step_values=step - sum(part.dense_weights - part.weights for part in parts),
        channels=parts,
        extra_weight_bytes=(channels.weight_bytes if channels else 0) + (prefill.weight_bytes if prefill else 0),
        preparation_s=channels.preparation_s if channels else None,
        preparation_bytes=channels.preparation_bytes if channels else 0,
    )
