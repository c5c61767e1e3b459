"""The rows of one pass through a pruned module, by their stage: what FFNs and routed experts have in common.

Prefill rows add to what the layer remembers of the sequences in the K/V cache; decode rows go by the partition that
follows from it. With `refresh`, some decode rows renew it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from stageprune.channels.costs import FFNCost
from stageprune.channels.memory import Memory
from stageprune.channels.observe import Observed
from stageprune.channels.sizes import Sizes
from stageprune.methods import OnlineChannelPruning
from stageprune.stages import Stage, StageTracker

Statistics: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
"""What `Memory.add` is given."""

Dense: TypeAlias = Callable[[Any], torch.Tensor]
"""The module's own forward on some rows."""


class StagedRows(ABC):
    """Stands in for the forward of one module.

    "Rows" are whatever the module is called with, by batch and position: they have a `shape` that begins with these,
    and `rows[:, a:b]` are some positions of them.

    Attributes:
        index: of the decoder layer.
        sizes: numbers of channels.
        observed: how tokens chose, if they were watched.
        preparation_s: what the last prompt's partition, and what the backend keeps for it, took, in seconds.
        preparation_bytes: what the backend keeps for it.
    """

    def __init__(self, index: int, sizes: Sizes, method: OnlineChannelPruning, tracker: StageTracker, key: str) -> None:
        self.index = index
        self.sizes = sizes
        self.observed: Observed | None = None
        self.preparation_s = 0.0
        self.preparation_bytes = 0
        self._method = method
        self._tracker = tracker
        self._key = (key, index)
        # Not as a decorator: that would import the compiler with this module. Statistics are Python state.
        self._staged = torch.compiler.disable(self._staged)  # type: ignore[method-assign, no-untyped-call]

    @property
    @abstractmethod
    def backend_name(self) -> str:
        """What runs decode rows."""

    @property
    @abstractmethod
    def weight_bytes(self) -> int:
        """Memory that this adds to the weights."""

    @property
    @abstractmethod
    def dense_cost(self) -> FFNCost:
        """Of a generated token in the untouched module."""

    @property
    @abstractmethod
    def cost(self) -> FFNCost:
        """Of a generated token."""

    @property
    @abstractmethod
    def prompt_saving(self) -> int:
        """Weights that a row of a long enough prompt is not multiplied with."""

    @abstractmethod
    def observe(self) -> None:
        """Watch the generated tokens from now on; forget what was seen before."""

    @abstractmethod
    def stop_observing(self) -> None:
        """Keep what was seen."""

    @property
    def prompt_channels(self) -> int:
        """How many channels the prompt's down projection uses."""
        rules = {"candidates": self.sizes.computed, "budget": self.sizes.active, "dense": self.sizes.total}
        return rules[self._method.prefill]

    @abstractmethod
    def _prefill(self, stage: Stage, memory: Memory, rows: Any) -> torch.Tensor:
        """The outputs of prefill rows, which are added to the memory."""

    @abstractmethod
    def _decode(self, dense: Dense, memory: Memory, rows: Any) -> torch.Tensor:
        """The outputs of decode rows; dense if the memory is empty."""

    @abstractmethod
    def _decode_once(self, dense: Dense, memory: Memory, row: Any) -> torch.Tensor:
        """Likewise of a row behind which the memory changes."""

    @abstractmethod
    def _generated(self, memory: Memory, row: Any) -> Statistics:
        """The statistics of one generated row."""

    def _staged(self, dense: Dense, stage: Stage, rows: Any) -> torch.Tensor:
        memory = stage.memory.get(self._key)
        if memory is None:
            memory = stage.memory[self._key] = Memory()
        count = rows.shape[1]
        # Skipped layers are called with the pass's decode rows only.
        prefill = max(0, count - (stage.length - stage.prefill))
        if not prefill and self._method.refresh is None:
            return self._decode(dense, memory, rows)
        outputs = []
        if stage.prefill:
            memory.first = stage.past + stage.prefill
        if prefill:
            outputs.append(self._prefill(stage, memory, rows[:, :prefill]))
        if prefill < count:
            rest = rows[:, prefill:]
            if self._method.refresh is None:
                outputs.append(self._decode(dense, memory, rest))
            else:
                outputs += self._decode_and_refresh(dense, memory, rest, stage.past + stage.length - rest.shape[1])
        result: torch.Tensor = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return result

    def _decode_and_refresh(self, dense: Dense, memory: Memory, rows: Any, position: int) -> list[torch.Tensor]:
        """Decode rows from `position` on, some of which renew the partition.

        Every `refresh`-th generated token computes all channels; it counts as that many tokens, and itself is the first
        to go by the new partition. A layer that saw no prompt is dense until it has seen `refresh` tokens.
        """
        every = self._method.refresh
        assert every is not None
        memory.take_back(position)
        outputs, start, count = [], 0, rows.shape[1]
        while start < count:
            index = position + start - memory.first
            collecting = not memory.prompted and memory.collected < every
            if collecting or (index > 0 and index % every == 0):
                row = rows[:, start : start + 1]
                sums, up_sums = self._generated(memory, row)
                weight = 1 if collecting else every
                memory.add_generated(position + start, weight * sums, None if up_sums is None else weight * up_sums)
                outputs.append(dense(row) if collecting else self._decode_once(dense, memory, row))
                start += 1
            else:
                stop = min(count, start + every - index % every)
                outputs.append(self._decode(dense, memory, rows[:, start:stop]))
                start = stop
        return outputs


def seen(memory: Memory, real: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """Which groups have seen a real prefill token by now: a shorter prompt can be all padding so far."""
    if real is None or (memory.sums is not None and memory.seen is None):
        return None
    now = real.any(1) if groups == len(real) else real.any()[None]
    now = now if memory.seen is None else memory.seen | now
    return None if bool(now.all()) else now
