"""Where the time of an answer goes: attention, FFNs, and the rest.

The modules that compute them are timed while `generate()` runs. The rest is norms, projections of skipped layers, the
head, and `generate()` itself. Timing costs time, too: on a GPU each module must be waited for. How much is said beside
the result, as the profiled answer over the same answer without.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.evaluate.clock import synchronize, timed_generate
from stageprune.families.decoder import find_decoder
from stageprune.overrides import MethodOverride
from stageprune.pruning import Handle

PARTS = {
    "attention": ("self_attn", "self_attention", "attention", "attn"),
    "ffn": ("mlp", "feed_forward", "ffn", "block_sparse_moe"),
}

Call = tuple[str, float, float]
"""Of a module: which part, when it began, when it ended."""


@dataclass(frozen=True)
class Split:
    """Seconds of one token.

    Attributes:
        attention: in all layers' attention.
        ffn: in all layers' FFNs.
        other: the rest.
    """

    attention: float
    ffn: float
    other: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.attention + self.ffn + self.other

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data: seconds, and shares of the total."""
        seconds = {"attention": self.attention, "ffn": self.ffn, "other": self.other}
        shares = {name: value / self.total for name, value in seconds.items()}
        return {"seconds": seconds, "shares": shares}


@dataclass(frozen=True)
class StageSplits:
    """Of one model.

    Attributes:
        first_token: the prompt, up to the first token.
        later_token: each token after it; None if there was one only.
        overhead: what timing added, as a share of the answer's time without.
    """

    first_token: Split
    later_token: Split | None
    overhead: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        later = self.later_token and self.later_token.to_dict()
        return {"first_token": self.first_token.to_dict(), "later_token": later, "overhead": self.overhead}


@dataclass(frozen=True)
class Profile:
    """Of both models, on the same prompt."""

    dense: StageSplits
    pruned: StageSplits

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"dense": self.dense.to_dict(), "pruned": self.pruned.to_dict()}


def profile(
    handle: Handle, input_ids: torch.Tensor, new_tokens: int, unprofiled_s: tuple[float, float], runs: int = 3
) -> Profile:
    """Split the time of an answer.

    Args:
        handle: of the pruned model.
        input_ids: the prompt, `[batch, length]`.
        new_tokens: length of the answer.
        unprofiled_s: the dense and the pruned answer's time without timing its parts.
        runs: of each model, in turns; medians are reported.

    Raises:
        UnsupportedModelError: if the layers' attention or FFN is not found.
    """
    found: dict[bool, list[tuple[Split, Split | None, float]]] = {True: [], False: []}
    for _ in range(runs):
        for dense in (True, False):
            found[dense].append(_run(handle, input_ids, new_tokens, dense))
    return Profile(*(_medians(found[dense], plain) for dense, plain in zip((True, False), unprofiled_s, strict=True)))


def split(calls: Sequence[Call], start: float, end: float, tokens: int = 1) -> Split:
    """Of the time from `start` to `end`, in which `tokens` were generated; per token."""
    inside = [(part, stop - begin) for part, begin, stop in calls if start <= begin and stop <= end]
    attention, ffn = (sum(seconds for name, seconds in inside if name == part) for part in PARTS)
    return Split(attention / tokens, ffn / tokens, max(end - start - attention - ffn, 0.0) / tokens)


def _run(handle: Handle, input_ids: torch.Tensor, new_tokens: int, dense: bool) -> tuple[Split, Split | None, float]:
    with handle.dense() if dense else nullcontext(), module_clock(handle.model) as calls:
        synchronize(input_ids.device)
        start = time.perf_counter()
        answer = timed_generate(handle.model, input_ids, new_tokens, stop_early=False)
    first, last = (start + answer.seconds[index] for index in (0, -1))
    later = split(calls, first, last, new_tokens - 1) if new_tokens > 1 else None
    return split(calls, start, first), later, answer.seconds[-1]


def _medians(runs: list[tuple[Split, Split | None, float]], plain: float) -> StageSplits:
    later = [part for _, part, _ in runs if part is not None]
    total = statistics.median(seconds for _, _, seconds in runs)
    return StageSplits(_median([part for part, _, _ in runs]), _median(later) if later else None, total / plain - 1)


def _median(splits: list[Split]) -> Split:
    """The one whose total is the median, so that its parts add up."""
    return sorted(splits, key=lambda one: one.total)[len(splits) // 2]


@contextmanager
def module_clock(model: nn.Module) -> Iterator[list[Call]]:
    """Inside, every call of a layer's attention or FFN is noted in the list.

    Raises:
        UnsupportedModelError: if a layer has none of the names that are known.
    """
    calls: list[Call] = []
    device = model.get_input_embeddings().weight.device  # type: ignore[operator]

    def timed(part: str) -> Any:
        def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
            synchronize(device)
            start = time.perf_counter()
            output = forward(*args, **kwargs)
            synchronize(device)
            calls.append((part, start, time.perf_counter()))
            return output

        return run

    active = []
    try:
        for index, layer in enumerate(find_decoder(model).layers):
            for part, names in PARTS.items():
                active.append(MethodOverride(_part(layer, index, part, names), "forward", timed(part)))
        yield calls
    finally:
        for override in reversed(active):
            override.remove()


def _part(layer: nn.Module, index: int, part: str, names: Sequence[str]) -> nn.Module:
    for name in names:
        module = getattr(layer, name, None)
        if isinstance(module, nn.Module):
            return module
    raise UnsupportedModelError(
        f"cannot split the time of layer {index} ({type(layer).__name__}): its {part} has none of the names "
        f"{', '.join(names)}"
    )
