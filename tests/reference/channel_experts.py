"""Online channel pruning of routed experts, token by token: each expert is an FFN whose prompt are its own tokens."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from reference import channel_ffn as ref


@dataclass
class Tally:
    """What one group's tokens left behind in one expert."""

    tokens: int = 0
    sums: Any = 0
    up_sums: Any = 0


@dataclass
class Group:
    """Sequences that share partitions."""

    rows: list[int]
    own: list[Tally] = field(default_factory=list)
    anybodys: list[Tally] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return all(tally.tokens == 0 for tally in self.anybodys)


class ReferenceExperts:
    """The forward of all experts: tokens `[batch * length, hidden_size]`, their experts, the weights of these."""

    def __init__(
        self,
        experts: list[ref.Weights],
        method: Any,
        ratio: float,
        context: torch.Tensor,
        real: torch.Tensor,
        passes: Collection[int],
    ) -> None:
        self.experts = experts
        delta = method.partition_fraction / 2 if method.pruned_share is None else ratio - method.pruned_share
        self.sizes = ref.sizes(experts[0].channels, ratio, delta, method.multiple)
        self.method = method
        self.context = context
        self.real = real
        self.passes = passes

    def __call__(self, hidden: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        batch, length = self.context.shape
        x, index, shares = (values.view(batch, length, -1) for values in (hidden, index, shares))
        outputs = torch.zeros_like(x)
        together = [list(range(batch))] if self.method.scope == "batch" else [[row] for row in range(batch)]
        for rows in together:
            group = Group(rows, [Tally() for _ in self.experts], [Tally() for _ in self.experts])
            first = collected = 0
            prompted = False
            for start, stop in stretches(self.context, self.passes):
                for row in rows:
                    for t in range(start, stop):
                        if self.context[row, t] and self.real[row, t]:
                            self._add(group, x[row, t], index[row, t].tolist(), shares[row, t])
                            prompted = True
                parts = self._partitions(group)
                for row in rows:
                    for t in range(start, stop):
                        if self.context[row, t]:
                            for slot, expert in enumerate(index[row, t].tolist()):
                                ffn, rule = self.experts[expert], self.method.prefill
                                one = ref.prefill_rows(ffn, x[row, t][None], parts[expert], rule)[0]
                                outputs[row, t] += shares[row, t, slot] * one
                for t in range(start, stop):
                    decode = [row for row in rows if not self.context[row, t]]
                    first = first if decode else t + 1
                    if not decode:
                        continue
                    every, generated = self.method.refresh, t - first
                    collecting = bool(every) and not prompted and collected < every
                    if collecting or (every and generated > 0 and generated % every == 0):
                        for row in decode:
                            weight = 1 if collecting else every
                            self._add(group, x[row, t], index[row, t].tolist(), shares[row, t], weight)
                        parts = self._partitions(group)
                        collected += 1
                    for expert in range(len(self.experts)):
                        users = [row for row in decode if expert in index[row, t].tolist()]
                        if users:
                            slots = [index[row, t].tolist().index(expert) for row in users]
                            share = shares[users, t, slots][:, None]
                            by = None if collecting else parts[expert]
                            outputs[users, t] += share * self._decode(expert, x[users, t], by, share)
        return outputs.flatten(0, 1)

    def _scored(self, expert: int, share: torch.Tensor) -> ref.Weights:
        """The expert, with activations as they are scored."""
        ffn = self.experts[expert]
        return replace(ffn, act=lambda v: share * ffn.act(v)) if self.method.routing_weights else ffn

    def _add(self, group: Group, x: torch.Tensor, used: list[int], shares: torch.Tensor, weight: int = 1) -> None:
        for expert, ffn in enumerate(self.experts):
            self._add_to(group.anybodys[expert], ffn, x, weight)
            if expert in used:
                self._add_to(group.own[expert], self._scored(expert, shares[used.index(expert)]), x, weight)

    @staticmethod
    def _add_to(tally: Tally, ffn: ref.Weights, x: torch.Tensor, weight: int) -> None:
        tally.tokens += weight
        tally.sums = tally.sums + weight * ref.add_rows(ffn, ref.no_rows(ffn), x[None])
        tally.up_sums = tally.up_sums + weight * ref.add_up_rows(ffn, ref.no_rows(ffn), x[None])

    def _partitions(self, group: Group) -> list[ref.Partition | None]:
        return [self._partition(group, expert) for expert in range(len(self.experts))]

    def _partition(self, group: Group, expert: int) -> ref.Partition | None:
        """None means dense."""
        if group.empty:
            return None
        ffn, tally = self.experts[expert], group.own[expert]
        sums, up_sums = tally.sums, tally.up_sums
        if tally.tokens < self.method.unseen_below:
            if self.method.unseen == "dense":
                return None
            if self.method.unseen == "layer":
                sums, up_sums = group.anybodys[expert].sums, group.anybodys[expert].up_sums
            else:
                sums = torch.ones(ffn.channels, dtype=torch.float64)
                up_sums = ffn.up.double().square().sum(1)
        return ref.partition(ffn, sums, self.sizes, up_sums)

    def _decode(self, expert: int, x: torch.Tensor, parts: ref.Partition | None, share: torch.Tensor) -> torch.Tensor:
        ffn = self.experts[expert]
        if parts is None:
            return ref.dense(ffn, x)
        keep = ref.chosen(self._scored(expert, share), x, parts, self.method.selection, self.method.up_share)
        return ref.down(ffn, ref.hidden(ffn, x, keep), keep)


def stretches(context: torch.Tensor, passes: Collection[int]) -> list[tuple[int, int]]:
    """Stretches whose prefill positions are added to the statistics at once; decode positions come after them."""
    length, is_context = context.shape[1], context.any(0).tolist()
    starts = {0, *(start for start in passes if start < length)}
    starts |= {t for t in range(1, length) if is_context[t] and not is_context[t - 1]}
    ordered = sorted(starts)
    return list(zip(ordered, [*ordered[1:], length], strict=True))


def experts_of(module: Any) -> list[ref.Weights]:
    """The weights of each expert of a zoo model."""
    if not hasattr(module, "gate_up_proj"):
        return [
            ref.Weights(one.gate_proj.weight, None, one.up_proj.weight, None, one.down_proj.weight, None, one.act_fn)
            for one in module
        ]
    found = []
    for both, down, expert in zip(module.gate_up_proj, module.down_proj, range(len(module.down_proj)), strict=True):
        if hasattr(module, "gate_up_proj_bias"):  # GPT-OSS
            bias, alpha, limit = module.gate_up_proj_bias[expert], module.alpha, module.limit

            def gate(v: torch.Tensor, alpha: float = alpha, limit: float = limit) -> torch.Tensor:
                return v.clamp(max=limit) * torch.sigmoid(alpha * v.clamp(max=limit))

            def up(v: torch.Tensor, limit: float = limit) -> torch.Tensor:
                return v.clamp(-limit, limit) + 1

            weights = both.T[::2], bias[::2], both.T[1::2], bias[1::2], down.T, module.down_proj_bias[expert]
            found.append(ref.Weights(*weights, gate, up))
        else:
            half = len(both) // 2
            found.append(ref.Weights(both[:half], None, both[half:], None, down, None, module.act_fn))
    return found
