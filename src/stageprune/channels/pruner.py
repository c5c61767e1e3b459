"""Online channel pruning, attached to one model (arXiv 2602.06822, section 3).

Each FFN is called with the rows of one pass. Prefill rows are computed on all channels up to the down projection, add
to the layer's statistics, and go through the down projection with the channels that the setting allows them. Decode
rows run with the partition that those statistics give, each with its own choice.

What a layer remembers, sums of squares and the partition, belongs to the sequences in the K/V cache: it continues over
chunks and turns and is freed with the cache. A layer that has seen no prefill row (a prompt of one token, or a layer
that prefill-only pruning skips) has no partition and stays dense, unless generated tokens give it one (`refresh`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional as F

from stageprune.channels.costs import FFNCost, dense_cost, pruned_cost
from stageprune.channels.kernels.base import Backend, make_layer
from stageprune.channels.kernels.choose import make_backend
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.memory import Memory
from stageprune.channels.observe import Observed, Observer
from stageprune.channels.partition import Partition, partition, statistics
from stageprune.channels.real_tokens import real_tokens
from stageprune.channels.sizes import Sizes, mlp_ratio_of, sizes_of
from stageprune.errors import SettingError
from stageprune.families.costs import linear_weights
from stageprune.families.decoder import Decoder
from stageprune.families.ffn import FFN, describe_ffn
from stageprune.methods import OnlineChannelPruning
from stageprune.overrides import MethodOverride
from stageprune.stages import Stage, StageTracker

_SLICED_ROWS = 64
"""Rows of a prompt from which on copying the kept weights of the down projection is less work than what they save."""


class ChannelPruner:
    """See the module's docstring.

    Attributes:
        layers: the pruned FFNs by layer index.

    Raises:
        SettingError: if the setting does not fit the model.
        UnsupportedModelError: if a layer's FFN cannot be described.
    """

    def __init__(self, decoder: Decoder, method: OnlineChannelPruning, tracker: StageTracker) -> None:
        self.method = method
        self.layers: dict[int, PrunedFFN] = {}
        self._overrides: list[MethodOverride] = []
        _check_layers(method, len(decoder.layers))
        for index, module in enumerate(decoder.layers):
            if index in method.protect or _requested(method, index) == 0:
                continue
            ffn = describe_ffn(index, module)
            sizes = sizes_of(ffn.intermediate_size, _mlp_ratio(method, index, decoder, ffn), method)
            if not sizes.dense:
                self.layers[index] = PrunedFFN(index, ffn, sizes, method, tracker)
        if method.refresh is not None:
            tracker.follow_positions()
        for layer in self.layers.values():
            self._overrides.append(MethodOverride(layer.ffn.module, "forward", layer, owner=self))

    @property
    def weight_bytes(self) -> int:
        """Memory that the backends add to the weights."""
        return sum(layer.backend.weight_bytes for layer in self.layers.values())

    @property
    def preparation_s(self) -> float | None:
        """What the last prompt's partitions and what backends keep for them took, in seconds; None without a prompt."""
        layers = [layer.preparation_s for layer in self.layers.values() if layer.preparation_s]
        return sum(layers) if layers else None

    @property
    def preparation_bytes(self) -> int:
        """What backends keep for the last prompt."""
        return sum(layer.preparation_bytes for layer in self.layers.values())

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Watch the generated tokens inside the block; see `observe.Observed`."""
        for layer in self.layers.values():
            layer.observe()
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.stop_observing()

    def detach(self) -> None:
        """Give the FFNs their own forward back."""
        for override in reversed(self._overrides):
            override.remove()
        self._overrides.clear()
        self.layers.clear()


class PrunedFFN:
    """Stands in for the forward of one FFN."""

    def __init__(self, index: int, ffn: FFN, sizes: Sizes, method: OnlineChannelPruning, tracker: StageTracker) -> None:
        self.index = index
        self.ffn = ffn
        self.sizes = sizes
        self._method = method
        self._tracker = tracker
        self._layer = make_layer(ffn, method.selection)
        self.backend: Backend = make_backend(method, self._layer)
        self._masked = MaskedBackend(self._layer)
        self.observed: Observed | None = None
        self.preparation_s = 0.0
        self.preparation_bytes = 0
        self._observer: Observer | None = None
        self._key = ("channels", index)
        # Not as a decorator: that would import the compiler with this module. Statistics are Python state.
        self._staged = torch.compiler.disable(self._staged)  # type: ignore[method-assign, no-untyped-call]

    @property
    def dense_cost(self) -> FFNCost:
        """Of a generated token in the untouched FFN."""
        return dense_cost(self._hidden_size, self.sizes.total, self.ffn.gate is not None)

    @property
    def cost(self) -> FFNCost:
        """Of a generated token."""
        return pruned_cost(self._hidden_size, self.sizes, self._method.selection, self.ffn.gate is not None)

    def observe(self) -> None:
        """Watch the generated tokens from now on; forget what was seen before."""
        self._observer = Observer(self._layer)

    def stop_observing(self) -> None:
        """Keep what was seen."""
        if self._observer is not None:
            self.observed = self._observer.result()
            self._observer = None

    @property
    def prompt_channels(self) -> int:
        """How many channels the prompt's down projection uses."""
        rules = {"candidates": self.sizes.computed, "budget": self.sizes.active, "dense": self.sizes.total}
        return rules[self._method.prefill]

    @property
    def prompt_saving(self) -> int:
        """Weights of the down projection that a row of a long enough prompt is not multiplied with."""
        return self._hidden_size * (self.sizes.total - self.prompt_channels) if self.ffn.plain else 0

    @property
    def _hidden_size(self) -> int:
        return int(self.ffn.down.weight.shape[0])

    def __call__(self, forward: Any, inputs: torch.Tensor) -> Any:
        """Answer one call of the FFN: `[batch, rows, hidden_size]`."""
        stage = self._tracker.current
        if stage is None:
            return forward(inputs)
        return self._staged(forward, stage, inputs)

    def _staged(self, forward: Any, stage: Stage, inputs: torch.Tensor) -> torch.Tensor:
        memory = stage.memory.get(self._key)
        if memory is None:
            memory = stage.memory[self._key] = Memory()
        # Skipped layers are called with the pass's decode rows only.
        prefill = max(0, inputs.shape[1] - (stage.length - stage.prefill))
        if not prefill and self._method.refresh is None:
            return self._decode(forward, memory, inputs)
        outputs = []
        if stage.prefill:
            memory.first = stage.past + stage.prefill
        if prefill:
            outputs.append(self._prefill(stage, memory, inputs[:, :prefill]))
        if prefill < inputs.shape[1]:
            rows = inputs[:, prefill:]
            if self._method.refresh is None:
                outputs.append(self._decode(forward, memory, rows))
            else:
                outputs += self._decode_and_refresh(forward, memory, rows, stage.past + stage.length - rows.shape[1])
        result: torch.Tensor = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=1)
        return result

    def _prefill(self, stage: Stage, memory: Memory, inputs: torch.Tensor) -> torch.Tensor:
        hidden, up = self.ffn.hidden_and_up(inputs)
        real = real_tokens(stage)
        if real is not None:
            real = real[:, : inputs.shape[1]]
        sums, up_sums = statistics(hidden, up, real, self._method)
        memory.seen = _seen(memory, real, len(sums))
        memory.add(sums, up_sums)
        return self._prompt_down(hidden, memory)

    def _prompt_down(self, hidden: torch.Tensor, memory: Memory) -> torch.Tensor:
        """The down projection of prefill rows, with the channels that they may use."""
        outputs: torch.Tensor
        count = self.prompt_channels
        if count == self.sizes.total:
            outputs = self.ffn.down(hidden)
            return outputs
        parts, down = self._partition(memory), self.ffn.down
        if len(parts.order) > 1 or hidden.shape[1] < _SLICED_ROWS or not self.ffn.plain:
            outputs = down(hidden.masked_fill(~parts.keep(count), 0))
            return outputs
        channels = parts.order[0, :count].sort().values
        return F.linear(hidden[..., channels], down.weight[:, channels], down.bias)

    def _decode(self, forward: Any, memory: Memory, inputs: torch.Tensor) -> torch.Tensor:
        if memory.sums is None:
            outputs: torch.Tensor = forward(inputs)
            return outputs
        parts = self._partition(memory)
        if memory.bound is None:
            start = time.perf_counter()
            memory.bound = self.backend.bind(parts)
            self.preparation_s += time.perf_counter() - start
            self.preparation_bytes = self.backend.bound_bytes(memory.bound)
        return self._run(forward, memory, inputs, self.backend, memory.bound)

    def _run(self, forward: Any, memory: Memory, inputs: torch.Tensor, backend: Backend, bound: Any) -> torch.Tensor:
        """Decode rows by the partition; dense where a sequence has none yet."""
        parts = self._partition(memory)
        if self._observer is not None:
            self._observer.see(inputs, parts)
        outputs = backend.run(inputs, parts, bound)
        return outputs if memory.seen is None else torch.where(memory.seen[:, None, None], outputs, forward(inputs))

    def _decode_and_refresh(
        self, forward: Any, memory: Memory, inputs: torch.Tensor, position: int
    ) -> list[torch.Tensor]:
        """Decode rows from `position` on, some of which renew the partition.

        Every `refresh`-th generated token computes all channels; it counts as that many tokens, and itself is the first
        to go by the new partition. A layer that saw no prompt is dense until it has seen `refresh` tokens.
        """
        every = self._method.refresh
        assert every is not None
        memory.take_back(position)
        outputs, start, rows = [], 0, inputs.shape[1]
        while start < rows:
            index = position + start - memory.first
            collecting = not memory.prompted and memory.collected < every
            if collecting or (index > 0 and index % every == 0):
                row = inputs[:, start : start + 1]
                sums, up_sums = statistics(*self.ffn.hidden_and_up(row), None, self._method)
                weight = 1 if collecting else every
                memory.add_generated(position + start, weight * sums, None if up_sums is None else weight * up_sums)
                # All channels are computed anyway: nothing is bound for this row.
                outputs.append(forward(row) if collecting else self._run(forward, memory, row, self._masked, None))
                start += 1
            else:
                stop = min(rows, start + every - index % every)
                outputs.append(self._decode(forward, memory, inputs[:, start:stop]))
                start = stop
        return outputs

    def _partition(self, memory: Memory) -> Partition:
        if memory.partition is None:
            assert memory.sums is not None
            start = time.perf_counter()
            memory.partition = partition(memory.sums, self._layer.column_norms, self.sizes, memory.up_sums)
            self.preparation_s = time.perf_counter() - start
        return memory.partition


def _seen(memory: Memory, real: torch.Tensor | None, groups: int) -> torch.Tensor | None:
    """Which groups have seen a real prefill token by now: a shorter prompt can be all padding so far."""
    if real is None or (memory.sums is not None and memory.seen is None):
        return None
    now = real.any(1) if groups == len(real) else real.any()[None]
    now = now if memory.seen is None else memory.seen | now
    return None if bool(now.all()) else now


def _requested(method: OnlineChannelPruning, index: int) -> float:
    if method.ratios is not None:
        return method.ratios[index]
    return method.ratio if method.mlp_ratio is None else method.mlp_ratio


def _mlp_ratio(method: OnlineChannelPruning, index: int, decoder: Decoder, ffn: FFN) -> float:
    requested = _requested(method, index)
    if method.ratios is not None or method.mlp_ratio is not None:
        return requested
    inside = linear_weights(ffn.module)
    return mlp_ratio_of(requested, linear_weights(decoder.layers[index]) - inside, inside)


def _check_layers(method: OnlineChannelPruning, count: int) -> None:
    if method.ratios is not None and len(method.ratios) != count:
        raise SettingError(f"ratios lists {len(method.ratios)} layers, but the model has {count}")
    outside = [index for index in method.protect if index >= count]
    if outside:
        raise SettingError(f"protect names layer {outside[0]}, but the model has {count} layers, 0 to {count - 1}")
