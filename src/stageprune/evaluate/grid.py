"""Speed over a grid of prompt lengths, batch sizes and settings."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.evaluate.profile import Profile, profile
from stageprune.evaluate.speed import (
    AnswerSpeed,
    DecodeSpeed,
    Pair,
    PrefillMemory,
    PrefillSpeed,
    alternate,
    answer_speed,
    decode_speed,
    prefill_memory,
    prefill_speed,
    warm_up,
)
from stageprune.evaluate.text import prompt_of
from stageprune.methods import Method, OnlineChannelPruning, PrefillOnlyPruning
from stageprune.pruning import Handle, prune


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Attributes:
        lengths: of the prompts, in tokens.
        settings: the methods to prune with, each combination by itself.
        batches: rows per call.
        prefill: whether to measure the time to the first token and its peak memory.
        new_tokens: how many tokens to generate to measure decoding; 1 for no such measurement.
        pairs: of dense and pruned turns, at least.
        seconds: for each cell, at least.
        profile: whether to split the time into attention, FFNs and the rest.
    """

    lengths: Sequence[int]
    settings: Sequence[Sequence[Method]] = ((PrefillOnlyPruning(),),)
    batches: Sequence[int] = (1,)
    prefill: bool = True
    new_tokens: int = 1
    pairs: int = 5
    seconds: float = 0.0
    profile: bool = False

    @property
    def cells(self) -> int:
        """How many combinations there are."""
        return len(self.lengths) * len(self.batches) * len(self.settings)


@dataclass(frozen=True)
class Cell:
    """One combination, measured.

    Attributes:
        methods: the settings.
        skipped_layers: how many layers the prompt skips.
        ffn_bytes: share of the FFN weights that a generated token reads.
        backends: what runs pruned FFNs.
        batch: rows per call.
        prompt_length: in tokens.
        pairs: of turns that were run.
        prefill, memory, decode, answer, profile: the results; None for what was not asked for.
    """

    methods: tuple[Method, ...]
    skipped_layers: int
    ffn_bytes: float
    backends: tuple[str, ...]
    batch: int
    prompt_length: int
    pairs: int
    prefill: PrefillSpeed | None
    memory: PrefillMemory | None
    decode: DecodeSpeed | None
    answer: AnswerSpeed | None
    profile: Profile | None

    @property
    def ratio(self) -> float | None:
        """Of the layers to skip; None without prefill-only pruning, or when it lists the layers."""
        found = (method for method in self.methods if isinstance(method, PrefillOnlyPruning))
        return next((method.ratio for method in found if isinstance(method.layers, str)), None)

    @property
    def channels(self) -> OnlineChannelPruning | None:
        """The settings of channel pruning, if there are any."""
        return next((method for method in self.methods if isinstance(method, OnlineChannelPruning)), None)

    @property
    def is_wide(self) -> bool:
        """Whether the times vary a lot: something else was running."""
        times = [self.prefill.dense_s] if self.prefill else []
        times += [self.decode.dense_tokens_per_s] if self.decode else []
        return any(spread.is_wide for spread in times)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {
            "ratio": self.ratio,
            "methods": [method.to_dict() for method in self.methods],
            "skipped_layers": self.skipped_layers,
            "ffn_bytes": self.ffn_bytes,
            "backends": list(self.backends),
            "batch": self.batch,
            "prompt_length": self.prompt_length,
            "pairs": self.pairs,
            "prefill": self.prefill and self.prefill.to_dict(),
            "memory": self.memory and self.memory.to_dict(),
            "decode": self.decode and self.decode.to_dict(),
            "answer": self.answer and self.answer.to_dict(),
            "profile": self.profile and self.profile.to_dict(),
        }


def run_grid(
    model: nn.Module, tokenizer: Any, grid: Grid, on_turn: Callable[[], object] = lambda: None
) -> Iterator[Cell]:
    """Measure each cell of a grid, on held-out prose; the model is dense again when the iterator ends.

    Args:
        model: a causal language model that is not pruned.
        tokenizer: of the model.
        grid: what to measure.
        on_turn: called after each turn, at least `2 * pairs` times for each cell.

    Raises:
        StagePruneError: if the model cannot be pruned in this way.
    """
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]
    for methods in grid.settings:
        with prune(model, *methods) as handle:
            report = handle.report()
            skipped, ffn_bytes = len(report.skipped_layers), 1 / report.ideal_ffn_speedup
            for batch in grid.batches:
                for length in grid.lengths:
                    rows = [prompt_of(tokenizer, length, start=row * length) for row in range(batch)]
                    input_ids = torch.tensor(rows, device=device)
                    warm_up(handle, input_ids)
                    memory = prefill_memory(handle, input_ids) if grid.prefill else None
                    turns = alternate(
                        handle, input_ids, grid.new_tokens, pairs=grid.pairs, seconds=grid.seconds, on_turn=on_turn
                    )
                    prefill = prefill_speed(handle, length, turns) if grid.prefill else None
                    decode = decode_speed(handle, length, turns) if grid.new_tokens > 1 else None
                    answer = answer_speed(handle, length, turns) if grid.new_tokens > 1 else None
                    parts = _profile(handle, input_ids, turns) if grid.profile else None
                    yield Cell(
                        tuple(methods),
                        skipped,
                        ffn_bytes,
                        report.backends,
                        batch,
                        length,
                        len(turns),
                        prefill,
                        memory,
                        decode,
                        answer,
                        parts,
                    )


def _profile(handle: Handle, input_ids: torch.Tensor, turns: list[Pair]) -> Profile:
    dense, pruned = (statistics.median(pair[kind].total_s for pair in turns) for kind in (0, 1))
    return profile(handle, input_ids, turns[0][0].tokens.shape[1], (dense, pruned))
