"""What a handle does to its model, in figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from stageprune.baselines.base import Attachment
from stageprune.channels.experts import PrunedExperts
from stageprune.channels.observe import Observed
from stageprune.channels.pruner import ChannelPruner, PrunedFFN
from stageprune.channels.sizes import Sizes
from stageprune.errors import SettingError
from stageprune.families.costs import layer_costs, prompt_flops, values_of_a_step
from stageprune.families.decoder import Decoder
from stageprune.families.vision import vision_flops
from stageprune.methods import Method
from stageprune.prefill.skip import PrefillPruner


@dataclass(frozen=True)
class ExpertsReport:
    """The routed experts of one layer.

    Attributes:
        total: how many there are.
        per_token: how many of them a token uses.
        prompt_tokens: how many tokens of the last prompt each got; None before the first prompt.
    """

    total: int
    per_token: int
    prompt_tokens: tuple[int, ...] | None

    @property
    def unused(self) -> int | None:
        """How many of them the last prompt did not use."""
        return None if self.prompt_tokens is None else self.prompt_tokens.count(0)


@dataclass(frozen=True)
class ChannelReport:
    """One FFN with pruned channels, or the routed experts of a layer, or its shared one.

    Attributes:
        layer: index of the decoder layer.
        sizes: how many channels are retained, candidates and active (of each expert).
        backend: what runs it for generated tokens.
        dense_weights: that a generated token reads in the untouched FFN (of the experts that it uses).
        weights: likewise, pruned.
        observed: how tokens chose, if `handle.observe()` watched any; experts are not watched.
        experts: the routed experts; None if this is an FFN for all tokens.
        shared: whether it is the FFN beside routed experts.
    """

    layer: int
    sizes: Sizes
    backend: str
    dense_weights: int
    weights: int
    observed: Observed | None
    experts: ExpertsReport | None = None
    shared: bool = False


@dataclass(frozen=True)
class VisionReport:
    """The prompts of one processor's output, up to the first token.

    Attributes:
        name: as given, such as the resolution of the image.
        batch: how many prompts.
        prompt_length: tokens of each, with those of images and videos, and padding.
        vision_flops: floating-point operations of the vision encoder and projector, which pruning does not touch.
        dense_flops: of the untouched language model.
        pruned_flops: of the pruned one.
    """

    name: str
    batch: int
    prompt_length: int
    vision_flops: int
    dense_flops: int
    pruned_flops: int

    @property
    def vision_share(self) -> float:
        """Share of the untouched model's operations that cannot be pruned, 0 to 1."""
        return self.vision_flops / (self.vision_flops + self.dense_flops)

    @property
    def ideal_speedup(self) -> float:
        """Of the time to the first token with the vision encoder included, if time went by operations alone."""
        return (self.vision_flops + self.dense_flops) / (self.vision_flops + self.pruned_flops)

    @property
    def ideal_language_speedup(self) -> float:
        """Likewise, with the vision encoder excluded (say, its features are cached)."""
        return self.dense_flops / self.pruned_flops

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        names = ("vision_share", "ideal_speedup", "ideal_language_speedup")
        return asdict(self) | {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class Report:
    """What is pruned, and what it saves.

    Attributes:
        model: the class of the model.
        methods: the settings in force.
        num_hidden_layers: of the model.
        skipped_layers: layers that the prompt skips, zero-based; with a baseline, that every token skips.
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
        vision: of each of the prompts with images or videos that were given.
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
    vision: tuple[VisionReport, ...] = ()

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
            "vision": [part.to_dict() for part in self.vision],
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
        if self.vision:
            lines += self._vision_lines()
        return "\n".join([*lines, f"extra weight memory: {self.extra_weight_bytes:,} bytes"])

    def _prefill_lines(self) -> list[str]:
        skipped = ", ".join(map(str, self.skipped_layers)) or "none"
        count = f"{len(self.skipped_layers)} of {self.num_hidden_layers}"
        return [
            f"{self.model}: the prompt skips {count} layers ({skipped})",
            f"prompt of {self.prompt_length} tokens: {self.dense_flops / 1e9:.1f} GFLOP dense, "
            f"{self.pruned_flops / 1e9:.1f} GFLOP pruned, ideal speed-up {self.ideal_speedup:.2f}x",
        ]

    def _vision_lines(self) -> list[str]:
        width = max(len("image"), *(len(part.name) for part in self.vision))
        lines = [
            "vision encoder and projector are untouched; GFLOP up to the first token, and ideal speed-up with them and "
            "without:",
            f"{'image':<{width}} {'tokens':>7} {'vision':>9} {'dense':>9} {'pruned':>9} {'untouched':>9} "
            f"{'with':>6} {'without':>7}",
        ]
        for part in self.vision:
            flops = (part.vision_flops, part.dense_flops, part.pruned_flops)
            lines.append(
                f"{part.name:<{width}} {part.prompt_length:>7} {' '.join(f'{count / 1e9:>9.1f}' for count in flops)} "
                f"{part.vision_share:>9.1%} {part.ideal_speedup:>5.2f}x {part.ideal_language_speedup:>6.2f}x"
            )
        return lines

    def _channel_lines(self) -> list[str]:
        backends = ", ".join(self.backends)
        pruned = len({part.layer for part in self.channels})
        lines = [
            f"{self.model}: channels of {pruned} of {self.num_hidden_layers} FFNs pruned ({backends}); a "
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
                f"{turnover:>9} {overlap:>8}{' shared expert' if part.shared else ''}"
            )
        routed = [part.experts for part in self.channels if part.experts is not None]
        if routed:
            lines.append(_experts_line(routed))
        return lines


def _experts_line(routed: Sequence[ExpertsReport]) -> str:
    total, used = sum(part.total for part in routed), sum(part.per_token for part in routed)
    line = f"routed experts: {total} in {len(routed)} layers, of which a token uses {used}, each with channels as above"
    unused = [part.unused for part in routed if part.unused is not None]
    return f"{line}; the last prompt did not use {sum(unused)}" if unused else line


def _channel_report(part: PrunedFFN | PrunedExperts, shared: bool) -> ChannelReport:
    experts = None
    if isinstance(part, PrunedExperts):
        tokens = None if part.prompt_tokens is None else tuple(int(count) for count in part.prompt_tokens.tolist())
        experts = ExpertsReport(len(part.experts.experts), part.experts.per_token, tokens)
    weights = part.dense_cost.weights, part.cost.weights
    return ChannelReport(part.index, part.sizes, part.backend_name, *weights, part.observed, experts, shared)


def make_report(
    decoder: Decoder,
    methods: Sequence[Method],
    prefill: PrefillPruner | None,
    channels: ChannelPruner | None,
    baseline: Attachment | None,
    prompt_length: int,
    images: Mapping[str, Mapping[str, Any]],
) -> Report:
    """Collect the figures; see `Report` and `Handle.report`."""
    pruned = channels.parts if channels else []
    parts = tuple(_channel_report(part, channels is not None and part in channels.shared.values()) for part in pruned)
    skipped = prefill.context_free if prefill else ()
    saved = sum(part.prompt_saving for part in pruned if part.index not in skipped)
    step = values_of_a_step(decoder, prompt_length)

    less, head = (sum(baseline.saved.values()), baseline.saved_head) if baseline else (0, 0)
    dropped = sorted(baseline.dropped) if baseline else []
    costs = layer_costs(decoder)

    def pruned_flops(length: int) -> int:
        gone = sum(costs[index].flops(length, 0) for index in dropped)
        return prompt_flops(decoder, length, skipped) - 2 * (length - 1) * saved - 2 * length * less - gone - 2 * head

    step_saved = sum(part.dense_weights - part.weights for part in parts) + less + head
    step_saved += sum(costs[index].values_read(prompt_length) for index in dropped)
    return Report(
        model=type(decoder.model).__name__,
        methods=tuple(method.to_dict() for method in methods),
        num_hidden_layers=len(decoder.layers),
        skipped_layers=prefill.skipped if prefill else tuple(dropped),
        prompt_length=prompt_length,
        dense_flops=prompt_flops(decoder, prompt_length),
        pruned_flops=pruned_flops(prompt_length),
        dense_step_values=step,
        pruned_step_values=step - step_saved,
        channels=parts,
        extra_weight_bytes=sum(part.weight_bytes for part in (prefill, channels, baseline) if part is not None),
        preparation_s=channels.preparation_s if channels else None,
        preparation_bytes=channels.preparation_bytes if channels else 0,
        vision=tuple(_vision(decoder, name, inputs, pruned_flops) for name, inputs in images.items()),
    )


def _vision(decoder: Decoder, name: str, inputs: Mapping[str, Any], pruned_flops: Callable[[int], int]) -> VisionReport:
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if not isinstance(tokens, torch.Tensor) or tokens.ndim != 2:
        given = sorted(inputs) if isinstance(inputs, Mapping) else type(inputs).__name__
        raise SettingError(
            f"images[{name!r}] must be what the processor returns for a prompt, with input_ids as a 2-D tensor; got "
            f"{given}"
        )
    batch, length = tokens.shape
    return VisionReport(
        name=name,
        batch=batch,
        prompt_length=length,
        vision_flops=vision_flops(decoder, inputs),
        dense_flops=batch * prompt_flops(decoder, length),
        pruned_flops=batch * pruned_flops(length),
    )
