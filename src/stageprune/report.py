"""What a handle does to its model, in figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import Decoder
from stageprune.methods import Method


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
        extra_weight_bytes: memory that pruning adds to the weights.
    """

    model: str
    methods: tuple[dict[str, Any], ...]
    num_hidden_layers: int
    skipped_layers: tuple[int, ...]
    prompt_length: int
    dense_flops: int
    pruned_flops: int
    extra_weight_bytes: int

    @property
    def ideal_speedup(self) -> float:
        """Of the time to the first token, if time went by floating-point operations alone."""
        return self.dense_flops / self.pruned_flops

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "ideal_speedup": self.ideal_speedup}

    def __str__(self) -> str:
        skipped = ", ".join(map(str, self.skipped_layers)) or "none"
        count = f"{len(self.skipped_layers)} of {self.num_hidden_layers}"
        return (
            f"{self.model}: the prompt skips {count} layers ({skipped})\n"
            f"prompt of {self.prompt_length} tokens: {self.dense_flops / 1e9:.1f} GFLOP dense, "
            f"{self.pruned_flops / 1e9:.1f} GFLOP pruned, ideal speed-up {self.ideal_speedup:.2f}x\n"
            f"extra weight memory: {self.extra_weight_bytes} bytes"
        )


def make_report(
    decoder: Decoder,
    methods: Sequence[Method],
    skipped: Sequence[Sequence[int]],
    context_free: Sequence[Sequence[int]],
    prompt_length: int,
) -> Report:
    """Collect the figures; see `Report`."""
    free = {index for layers in context_free for index in layers}
    return Report(
        model=type(decoder.model).__name__,
        methods=tuple(method.to_dict() for method in methods),
        num_hidden_layers=len(decoder.layers),
        skipped_layers=tuple(sorted({index for layers in skipped for index in layers})),
        prompt_length=prompt_length,
        dense_flops=prompt_flops(decoder, prompt_length),
        pruned_flops=prompt_flops(decoder, prompt_length, free),
        extra_weight_bytes=0,
    )
