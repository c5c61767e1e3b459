"""Online channel pruning of routed experts: each has a partition of its own channels, from the tokens routed to it.

The paper prunes mixtures of experts without saying how (digest of arXiv 2602.06822, section 2). Here an expert is an
FFN whose prompt are the tokens that the router sent to it: their activations give its statistics, and a generated token
chooses anew in each of its experts. The router decides as it always does.

What is remembered for a (sequence, expert) pair is one row of numbers: how many tokens it had, its sums of squares, and
what else the settings need. So whatever is remembered, taken back or moved is so as a whole.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch

from stageprune.channels.costs import FFNCost, dense_cost, pruned_cost
from stageprune.channels.kernels.base import Layer, make_layer, norms
from stageprune.channels.kernels.choose import make_backend
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.memory import Memory
from stageprune.channels.partition import Partition, partition, squares
from stageprune.channels.real_tokens import batch_of, real_tokens
from stageprune.channels.sizes import Sizes
from stageprune.channels.staged import Dense, StagedRows, Statistics, seen
from stageprune.errors import UnsupportedModelError
from stageprune.families.experts import Experts, routed
from stageprune.methods import OnlineChannelPruning
from stageprune.stages import Stage, StageTracker


@dataclass(frozen=True)
class Rows:
    """Tokens with the router's choice, by batch and position.

    Attributes:
        hidden: `[batch, rows, hidden_size]`.
        index: the experts of each token, `[batch, rows, per_token]`.
        weights: their weights, likewise.
    """

    hidden: torch.Tensor
    index: torch.Tensor
    weights: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the tokens."""
        return self.hidden.shape

    def __getitem__(self, places: Any) -> Rows:
        return Rows(self.hidden[places], self.index[places], self.weights[places])

    def flat(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As experts are called, batch and position in one axis."""
        return self.hidden.flatten(0, 1), self.index.flatten(0, 1), self.weights.flatten(0, 1)


@dataclass(frozen=True)
class _Parts:
    """An expert's partition for each group, and which groups go by none because their prompt did not use it."""

    partition: Partition
    dense: torch.Tensor | None

    def of(self, groups: torch.Tensor) -> _Parts:
        """For tokens of these groups, `[tokens]`: each its own partition."""
        parts = self.partition
        taken = replace(
            parts,
            order=parts.order[groups],
            computed=parts.computed[groups],
            candidates=parts.candidates[groups],
            up_sizes=None if parts.up_sizes is None else parts.up_sizes[groups],
        )
        return _Parts(taken, None if self.dense is None else self.dense[groups])

    def extended(self, keep: torch.Tensor) -> torch.Tensor:
        """All channels are active where there is no partition; `keep` is `[groups, rows, h]`."""
        return keep if self.dense is None else keep | self.dense[:, None, None]


class PrunedExperts(StagedRows):
    """Stands in for the forward of all routed experts of one layer.

    Attributes:
        experts: their description.
        prompt_tokens: how many real prompt tokens each expert got, in the last prompt; None before the first.

    Raises:
        UnsupportedModelError: if a backend is forced that is not for experts.
    """

    backend_name = MaskedBackend.name
    weight_bytes = 0

    def __init__(
        self, index: int, experts: Experts, sizes: Sizes, method: OnlineChannelPruning, tracker: StageTracker
    ) -> None:
        super().__init__(index, sizes, method, tracker, "experts")
        if method.backend not in ("auto", "masked"):
            raise UnsupportedModelError(
                f"backend={method.backend!r} cannot run routed experts (layer {index}); use 'masked' or 'auto'"
            )
        self.module = experts.module
        self.experts = experts
        self.prompt_tokens: torch.Tensor | None = None
        self._layers = [make_layer(ffn, method.selection) for ffn in experts.experts]
        make_backend(replace(method, backend="masked"), self._layers[0])  # refuses selections that need a gate
        up, layer = method.selection == "cascade", method.unseen == "layer"
        self._columns = 1 + sizes.total * (1 + up) * (1 + layer)

    @property
    def dense_cost(self) -> FFNCost:
        """Of a generated token in the untouched experts that it uses."""
        gated = self.experts.experts[0].gate is not None
        return self._of_all(dense_cost(self.experts.hidden_size, self.sizes.total, gated))

    @property
    def cost(self) -> FFNCost:
        """Of a generated token."""
        gated = self.experts.experts[0].gate is not None
        return self._of_all(pruned_cost(self.experts.hidden_size, self.sizes, self._method.selection, gated))

    def _of_all(self, one: FFNCost) -> FFNCost:
        count = self.experts.per_token
        return FFNCost(one.hidden_size, count * one.gate, count * one.up, count * one.down)

    @property
    def prompt_saving(self) -> int:
        """None: channels that the prompt may not use are set to zero."""
        return 0

    def observe(self) -> None:
        """Experts are not watched: the next token has other ones, so there is no choice before to compare with."""

    def stop_observing(self) -> None:
        """Nothing was seen."""

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer one call of the experts: tokens `[tokens, hidden_size]`, their experts, and the weights of these."""
        stage = self._tracker.current
        if stage is None:
            return forward(*args, **kwargs)
        # Their names differ, their order does not.
        hidden, index, weights = (*args, *kwargs.values())
        batch = batch_of(stage)
        rows = Rows(*(values.reshape(batch, -1, values.shape[-1]) for values in (hidden, index, weights)))

        def dense(some: Rows) -> torch.Tensor:
            outputs: torch.Tensor = forward(*some.flat())
            return outputs.view(some.shape)

        return self._staged(dense, stage, rows).reshape(hidden.shape)

    # -- prefill ------------------------------------------------------------------------------------------------------

    def _prefill(self, stage: Stage, memory: Memory, rows: Rows) -> torch.Tensor:
        self.preparation_s = 0.0
        real = real_tokens(stage)
        if real is not None:
            real = real[:, : rows.shape[1]]
        kept: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        tallies = self._tallies(memory, rows, real, kept)
        memory.seen = seen(memory, real, len(tallies))
        memory.add(tallies, None)
        assert memory.sums is not None
        self.prompt_tokens = memory.sums[..., 0].sum(0)
        length, (hidden, _, weights) = rows.shape[1], rows.flat()
        outputs = torch.zeros_like(hidden)
        for expert, tokens, slots, activations in kept:
            keep = self._prompt_keep(memory, expert, tokens // length)
            values = activations if keep is None else activations.masked_fill(~keep, 0)
            self._add(outputs, tokens, self.experts.experts[expert].down(values) * weights[tokens, slots, None])
        return outputs.view(rows.shape)

    def _prompt_keep(self, memory: Memory, expert: int, sequences: torch.Tensor) -> torch.Tensor | None:
        """The channels that prompt tokens of these sequences may use, `[tokens or 1, h]`; None: all."""
        if self.prompt_channels == self.sizes.total:
            return None
        parts = self._partition(memory, expert)
        keep = parts.extended(parts.partition.keep(self.prompt_channels))[:, 0]
        return keep if len(keep) == 1 else keep[sequences]

    # -- what is remembered -------------------------------------------------------------------------------------------

    def _generated(self, memory: Memory, row: Rows) -> Statistics:
        return self._tallies(memory, row, None, []), None

    def _tallies(self, memory: Memory, rows: Rows, real: torch.Tensor | None, kept: list[Any]) -> torch.Tensor:
        """What these tokens add, `[groups, experts, columns]`: their number, and their sums of squares.

        Args:
            memory: before them.
            rows: the tokens.
            real: false at padding, `[batch, rows]`; None if there is none.
            kept: gets each used expert, its tokens, their slots, and their activations.
        """
        batch, length = rows.shape[:2]
        total, cascade = self.sizes.total, self._method.selection == "cascade"
        hidden, index, weights = rows.flat()
        groups = 1 if self._method.scope == "batch" else batch
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        tallies = torch.zeros(groups, len(self._layers), self._columns, dtype=dtype, device=hidden.device)
        for expert, tokens, slots in routed(index, len(self._layers)):
            activations, up = self.experts.experts[expert].hidden_and_up(hidden[tokens])
            kept.append((expert, tokens, slots, activations))
            scored = activations * weights[tokens, slots, None] if self._method.routing_weights else activations
            counts = torch.ones_like(tokens, dtype=torch.bool) if real is None else real.flatten()[tokens]
            parts = [counts[:, None].to(dtype), _squared(scored, counts, dtype)]
            parts += [_squared(up, counts, dtype)] if cascade else []
            sums = self._by_group(torch.cat(parts, dim=1), tokens // length, batch)
            tallies[:, expert, : sums.shape[1]] = sums
        if self._method.unseen == "layer":
            before = tallies if memory.sums is None else tallies + memory.sums
            for expert in self._unseen(before).any(0).nonzero().flatten().tolist():
                activations, up = self.experts.experts[expert].hidden_and_up(rows.hidden)
                found = [squares(values, real) for values in ([activations, up] if cascade else [activations])]
                sums = torch.cat(found, dim=1)
                sums = sums.sum(0, keepdim=True) if groups < batch else sums
                tallies[:, expert, 1 + total * (1 + cascade) :] = sums
        return tallies

    def _by_group(self, values: torch.Tensor, sequences: torch.Tensor, batch: int) -> torch.Tensor:
        """Summed over the tokens of each group: `[tokens, n]` in ascending order of `sequences` to `[groups, n]`."""
        if self._method.scope == "batch":
            return values.sum(0, keepdim=True)
        lengths = sequences.bincount(minlength=batch).tolist()
        return torch.stack([part.sum(0) for part in torch.split(values, lengths)])

    def _unseen(self, tallies: torch.Tensor) -> torch.Tensor:
        """Which experts a group's prompt used too little, `[groups, ...]`."""
        return tallies[..., 0] < self._method.unseen_below

    def _partition(self, memory: Memory, expert: int) -> _Parts:
        """The expert's, made when it is needed first."""
        if memory.partition is None:
            memory.partition = {}
        known = cast(dict[int, _Parts], memory.partition)
        if expert not in known:
            start = time.perf_counter()
            assert memory.sums is not None
            known[expert] = self._make_partition(memory.sums[:, expert], self._layers[expert])
            self.preparation_s += time.perf_counter() - start
        return known[expert]

    def _make_partition(self, tallies: torch.Tensor, layer: Layer) -> _Parts:
        total, cascade, policy = self.sizes.total, self._method.selection == "cascade", self._method.unseen
        unseen = self._unseen(tallies)
        sums, *others = torch.split(tallies[:, 1:], total, dim=1)
        up_sums = others.pop(0) if cascade else None
        if policy == "weights":
            sums = sums.masked_fill(unseen[:, None], 1)
            if up_sums is not None:
                up_sums = torch.where(unseen[:, None], norms(layer.ffn.up.weight, 1).to(sums.dtype).square(), up_sums)
        elif policy == "layer":
            sums = torch.where(unseen[:, None], others[0], sums)
            up_sums = torch.where(unseen[:, None], others[1], up_sums) if up_sums is not None else None
        parts = partition(sums, layer.column_norms, self.sizes, up_sums)
        return _Parts(parts, unseen if policy == "dense" else None)

    # -- decode -------------------------------------------------------------------------------------------------------

    def _decode(self, dense: Dense, memory: Memory, rows: Rows) -> torch.Tensor:
        if memory.sums is None:
            return dense(rows)
        length, (hidden, index, weights) = rows.shape[1], rows.flat()
        outputs = torch.zeros_like(hidden)
        for expert, tokens, slots in routed(index, len(self._layers)):
            parts = self._partition(memory, expert)
            for some in self._together(tokens, rows):
                shares = weights[tokens[some], slots[some], None]
                groups = tokens[some] // length if len(parts.partition.order) > 1 else None
                one = self._choose(expert, hidden[tokens[some]], shares, parts, groups, alone=len(rows.hidden) == 1)
                self._add(outputs, tokens[some], one)
        result = outputs.view(rows.shape)
        return result if memory.seen is None else torch.where(memory.seen[:, None, None], result, dense(rows))

    def _decode_once(self, dense: Dense, memory: Memory, row: Rows) -> torch.Tensor:
        return self._decode(dense, memory, row)

    def _together(self, tokens: torch.Tensor, rows: Rows) -> Iterator[torch.Tensor]:
        """Which of an expert's tokens are computed at once: where a batch shares its choice, those of one position."""
        batch, length = rows.shape[:2]
        if self._method.scope == "sequence" or batch == 1 or length == 1:
            yield torch.arange(len(tokens), device=tokens.device)
            return
        positions = tokens % length
        for position in torch.unique(positions).tolist():
            yield (positions == position).nonzero().flatten()

    def _choose(
        self,
        expert: int,
        inputs: torch.Tensor,
        shares: torch.Tensor,
        parts: _Parts,
        groups: torch.Tensor | None,
        alone: bool,
    ) -> torch.Tensor:
        """Weighted outputs of one expert for tokens `[tokens, hidden_size]`, with the channels that they choose.

        Args:
            expert: its number.
            inputs: the tokens.
            shares: the router's weight of each, `[tokens, 1]`.
            parts: the expert's.
            groups: of each token, where groups have a partition of their own; None where all share one.
            alone: whether the tokens are of a single sequence, so that each chooses for itself.
        """
        # As [batch, rows, ...]: what is in different rows chooses by itself, what shares a group and a row together.
        across = 0 if alone else 1
        inputs, shares = inputs.unsqueeze(across), shares.unsqueeze(across)
        layer = self._layers[expert]
        if groups is not None:
            parts = parts.of(groups)
        if self._method.routing_weights:
            act = layer.ffn.act
            layer = replace(layer, ffn=replace(layer.ffn, act=lambda values: act(values) * shares))
        hidden, keep = MaskedBackend(layer).hidden_and_active(inputs, parts.partition)
        outputs = layer.ffn.down(hidden.masked_fill(~parts.extended(keep), 0))
        if not self._method.routing_weights:
            outputs = outputs * shares
        elif layer.ffn.down.bias is not None:
            outputs = outputs + (shares - 1) * layer.ffn.down.bias
        return outputs.squeeze(across)

    @staticmethod
    def _add(outputs: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> None:
        outputs.index_add_(0, tokens, values.to(outputs.dtype))


def _squared(values: torch.Tensor, counts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 at padding."""
    return values.to(dtype).masked_fill(~counts[:, None], 0).square()
