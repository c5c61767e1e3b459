"""Online channel pruning, attached to one model (arXiv 2602.06822, section 3).

Each FFN (or all routed experts of a layer, see `experts.py`) is called with the rows of one pass. Prefill rows are
computed on all channels up to the down projection, add to the layer's statistics, and go through the down projection
with the channels that the setting allows them. Decode rows run with the partition that those statistics give, each with
its own choice.

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
from torch import nn
from torch.nn import functional as F

from stageprune.channels.costs import FFNCost, dense_cost, pruned_cost
from stageprune.channels.experts import PrunedExperts
from stageprune.channels.kernels.base import Backend, make_layer
from stageprune.channels.kernels.choose import make_backend
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.memory import Memory
from stageprune.channels.observe import Observer
from stageprune.channels.partition import Partition, partition, statistics
from stageprune.channels.real_tokens import batch_of, real_tokens
from stageprune.channels.sizes import Sizes, check_layers, layer_ratio, requested_ratio, sizes_of
from stageprune.channels.staged import Dense, StagedRows, Statistics, seen
from stageprune.errors import SettingError
from stageprune.families.costs import linear_weights
from stageprune.families.decoder import Decoder
from stageprune.families.experts import Experts, describe_experts
from stageprune.families.ffn import FFN, describe_ffn
from stageprune.methods import OnlineChannelPruning
from stageprune.overrides import MethodOverride
from stageprune.stages import Stage, StageTracker

_SLICED_ROWS = 64
"""Rows of a prompt from which on copying the kept weights of the down projection is less work than what they save."""


class ChannelPruner:
    """See the module's docstring.

    Attributes:
        layers: the pruned FFNs, or routed experts, by layer index.
        shared: the pruned shared experts, by layer index.

    Raises:
        SettingError: if the setting does not fit the model.
        UnsupportedModelError: if a layer's FFN cannot be described.
    """

    def __init__(self, decoder: Decoder, method: OnlineChannelPruning, tracker: StageTracker) -> None:
        self.method = method
        self.layers: dict[int, PrunedFFN | PrunedExperts] = {}
        self.shared: dict[int, PrunedFFN] = {}
        self._overrides: list[MethodOverride] = []
        check_layers(method, len(decoder.layers), "model")
        for index, module in enumerate(decoder.layers):
            if index in method.protect or requested_ratio(method, index) == 0:
                continue
            experts = describe_experts(index, module)
            if experts is not None:
                self._add_experts(index, module, experts, tracker)
                continue
            ffn = describe_ffn(index, module)
            sizes = sizes_of(ffn.intermediate_size, _ffn_ratio(method, index, module, ffn), method)
            if not sizes.dense:
                self.layers[index] = PrunedFFN(index, ffn, sizes, method, tracker)
        if method.refresh is not None:
            tracker.follow_positions()
        for part in self.parts:
            self._overrides.append(MethodOverride(part.module, "forward", part, owner=self))

    def _add_experts(self, index: int, layer: nn.Module, experts: Experts, tracker: StageTracker) -> None:
        method, shared = self.method, experts.shared
        ratio = _experts_ratio(method, index, layer, experts)
        sizes = sizes_of(experts.intermediate_size, ratio, method)
        if not sizes.dense:
            self.layers[index] = PrunedExperts(index, experts, sizes, method, tracker)
        if method.shared_experts and shared is not None:
            sizes = sizes_of(shared.intermediate_size, ratio, method)
            if not sizes.dense:
                self.shared[index] = PrunedFFN(index, shared, sizes, method, tracker, "shared")

    @property
    def parts(self) -> list[PrunedFFN | PrunedExperts]:
        """Everything that is pruned, by layer."""
        found: list[PrunedFFN | PrunedExperts] = [*self.layers.values(), *self.shared.values()]
        return sorted(found, key=lambda part: part.index)

    @property
    def weight_bytes(self) -> int:
        """Memory that the backends add to the weights."""
        return sum(part.weight_bytes for part in self.parts)

    @property
    def preparation_s(self) -> float | None:
        """What the last prompt's partitions and what backends keep for them took, in seconds; None without a prompt."""
        times = [part.preparation_s for part in self.parts if part.preparation_s]
        return sum(times) if times else None

    @property
    def preparation_bytes(self) -> int:
        """What backends keep for the last prompt."""
        return sum(part.preparation_bytes for part in self.parts)

    @contextmanager
    def observe(self) -> Iterator[None]:
        """Watch the generated tokens inside the block; see `observe.Observed`.

        Raises:
            SettingError: if all that is pruned are routed experts.
        """
        if self.parts and not any(isinstance(part, PrunedFFN) for part in self.parts):
            raise SettingError(
                "observe() compares each token's channels with those of the token before, in FFNs that all tokens use; "
                "this model's pruned channels are all in routed experts"
            )
        for part in self.parts:
            part.observe()
        try:
            yield
        finally:
            for part in self.parts:
                part.stop_observing()

    def detach(self) -> None:
        """Give the FFNs their own forward back."""
        for override in reversed(self._overrides):
            override.remove()
        self._overrides.clear()
        self.layers.clear()
        self.shared.clear()


class PrunedFFN(StagedRows):
    """Stands in for the forward of one FFN.

    Args:
        index: of the decoder layer.
        ffn: the FFN.
        sizes: numbers of channels.
        method: the settings.
        tracker: knows the stages of the current pass.
        key: under which its memory is kept, with the layer's index.
    """

    def __init__(
        self,
        index: int,
        ffn: FFN,
        sizes: Sizes,
        method: OnlineChannelPruning,
        tracker: StageTracker,
        key: str = "channels",
    ) -> None:
        super().__init__(index, sizes, method, tracker, key)
        self.module = ffn.module
        self.ffn = ffn
        self._layer = make_layer(ffn, method.selection)
        self.backend: Backend = make_backend(method, self._layer)
        self._masked = MaskedBackend(self._layer)
        self._observer: Observer | None = None

    @property
    def backend_name(self) -> str:
        """What runs decode rows."""
        return self.backend.name

    @property
    def weight_bytes(self) -> int:
        """Memory that the backend adds to the weights."""
        return self.backend.weight_bytes

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
    def prompt_saving(self) -> int:
        """Weights of the down projection that a row of a long enough prompt is not multiplied with."""
        return self._hidden_size * (self.sizes.total - self.prompt_channels) if self.ffn.plain else 0

    @property
    def _hidden_size(self) -> int:
        return int(self.ffn.down.weight.shape[0])

    def __call__(self, forward: Any, inputs: torch.Tensor) -> Any:
        """Answer one call of the FFN: `[batch, rows, hidden_size]`, or both in one axis."""
        stage = self._tracker.current
        if stage is None:
            return forward(inputs)
        if inputs.ndim == 3:
            return self._staged(forward, stage, inputs)
        # Blocks of experts call shared ones with their flattened tokens.
        rows = inputs.reshape(batch_of(stage), -1, inputs.shape[-1])
        return self._staged(forward, stage, rows).reshape(inputs.shape)

    def _prefill(self, stage: Stage, memory: Memory, rows: torch.Tensor) -> torch.Tensor:
        hidden, up = self.ffn.hidden_and_up(rows)
        real = real_tokens(stage)
        if real is not None:
            real = real[:, : rows.shape[1]]
        sums, up_sums = statistics(hidden, up, real, self._method)
        memory.seen = seen(memory, real, len(sums))
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

    def _decode(self, dense: Dense, memory: Memory, rows: torch.Tensor) -> torch.Tensor:
        if memory.sums is None:
            return dense(rows)
        parts = self._partition(memory)
        if memory.bound is None:
            start = time.perf_counter()
            memory.bound = self.backend.bind(parts)
            self.preparation_s += time.perf_counter() - start
            self.preparation_bytes = self.backend.bound_bytes(memory.bound)
        return self._run(dense, memory, rows, self.backend, memory.bound)

    def _decode_once(self, dense: Dense, memory: Memory, row: torch.Tensor) -> torch.Tensor:
        # All channels are computed anyway: nothing is bound for this row.
        return self._run(dense, memory, row, self._masked, None)

    def _generated(self, memory: Memory, row: torch.Tensor) -> Statistics:
        return statistics(*self.ffn.hidden_and_up(row), None, self._method)

    def _run(self, dense: Dense, memory: Memory, rows: torch.Tensor, backend: Backend, bound: Any) -> torch.Tensor:
        """Decode rows by the partition; dense where a sequence has none yet."""
        parts = self._partition(memory)
        if self._observer is not None:
            self._observer.see(rows, parts)
        outputs = backend.run(rows, parts, bound)
        return outputs if memory.seen is None else torch.where(memory.seen[:, None, None], outputs, dense(rows))

    def _partition(self, memory: Memory) -> Partition:
        if memory.partition is None:
            assert memory.sums is not None
            start = time.perf_counter()
            memory.partition = partition(memory.sums, self._layer.column_norms, self.sizes, memory.up_sums)
            self.preparation_s = time.perf_counter() - start
        result: Partition = memory.partition
        return result


def _ffn_ratio(method: OnlineChannelPruning, index: int, layer: nn.Module, ffn: FFN) -> float:
    inside = linear_weights(ffn.module)
    return layer_ratio(method, index, linear_weights(layer) - inside, inside)


def _experts_ratio(method: OnlineChannelPruning, index: int, layer: nn.Module, experts: Experts) -> float:
    """Of the routed experts that a token uses and the attention; shared experts count where they are pruned, too."""
    inside = experts.active_weights
    if method.shared_experts and experts.shared is not None:
        inside += linear_weights(experts.shared.module)
    return layer_ratio(method, index, linear_weights(layer) - linear_weights(experts.block), inside)
