"""A whole model with online channel pruning, by one forward without a cache over the whole sequence.

Every FFN's forward is replaced by the loops of `reference.channel_ffn`, which are told which positions encode the
context, which are padding, and where the passes began that a cache would have been filled in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from reference import channel_ffn as ref
from reference.channel_experts import ReferenceExperts, experts_of, stretches
from reference.generation import greedy_by
from reference.prefill_oracle import gated_logits, layers_of


@torch.no_grad()
def channel_logits(
    model: Any,
    method: Any,
    prefill: torch.Tensor | int,
    *,
    passes: Collection[int] = (),
    skipped: Collection[int] = (),
    **inputs: Any,
) -> torch.Tensor:
    """Logits `[batch, length, vocabulary]` under the settings of an `OnlineChannelPruning`.

    Args:
        model: untouched.
        method: the settings.
        prefill: how many leading positions are prefill, or a boolean mask `[batch, length]` of them.
        passes: where passes over prefill positions begin, besides each place where decode changes to prefill.
        skipped: layers that prefill-only pruning skips. They, and with them the last layer, whose output at prefill
            positions nobody needs, see decode rows only, so that their FFNs are dense (with `refresh`, at first).
        inputs: `input_ids` and so on.
    """
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    batch, length = tokens.shape[:2]
    context = (torch.arange(length) < prefill)[None].expand(batch, length) if isinstance(prefill, int) else prefill
    mask = inputs.get("attention_mask")
    real = torch.ones(batch, length, dtype=torch.bool) if mask is None else mask.bool()
    without_statistics = {*skipped, len(layers_of(model)) - 1} if skipped else set()
    with replaced(model, method, context, real, passes, without_statistics):
        return gated_logits(model, skipped, context, **inputs)


@torch.no_grad()
def greedy(
    model: Any,
    method: Any,
    input_ids: torch.Tensor,
    new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    context: torch.Tensor | None = None,
    passes: Collection[int] = (),
    skipped: Collection[int] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences `[batch, length + new_tokens]` and the logits that chose each token `[batch, new_tokens, vocabulary]`.

    Args:
        model: untouched.
        method: the settings.
        input_ids: the prompts, `[batch, length]`, padded on the left.
        new_tokens: how many tokens to generate.
        attention_mask: 0 at padding.
        context: which prompt positions are prefill, `[batch, length]`; by default all but the last.
        passes: see `channel_logits`.
        skipped: see `channel_logits`.
    """

    def logits_of(closed: torch.Tensor, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        return channel_logits(model, method, closed, passes=passes, skipped=skipped, **inputs)

    return greedy_by(logits_of, input_ids, new_tokens, attention_mask, context)


@contextmanager
def replaced(
    model: Any,
    method: Any,
    context: torch.Tensor,
    real: torch.Tensor,
    passes: Collection[int],
    without_statistics: Collection[int],
) -> Iterator[None]:
    """Inside the block the FFNs of the model are the reference."""
    modules = []
    try:
        for index, layer in enumerate(layers_of(model)):
            ratio = mlp_ratio(model, method, index)
            counts = real & (index not in without_statistics)
            if ratio > 0 and index not in method.protect and (method.refresh or counts.any()):
                for module, forward in stand_ins(layer.mlp, method, ratio, context, counts, passes):
                    module.forward = forward
                    modules.append(module)
        yield
    finally:
        for module in modules:
            del module.forward


def stand_ins(mlp: Any, *arguments: Any) -> list[tuple[Any, Any]]:
    """The modules of an FFN branch that the method prunes, and what takes the place of their forwards."""
    if not hasattr(mlp, "experts"):
        return [(mlp, ReferenceFFN(mlp, *arguments))]
    found: list[tuple[Any, Any]] = [(mlp.experts, ReferenceExperts(experts_of(mlp.experts), *arguments))]
    method, _, context, *_ = arguments
    if method.shared_experts and hasattr(mlp, "shared_expert"):
        shared = ReferenceFFN(mlp.shared_expert, *arguments)
        found.append((mlp.shared_expert, lambda x: shared(x.view(*context.shape, -1)).flatten(0, 1)))
    return found


Add: TypeAlias = Callable[[ref.Weights, torch.Tensor, torch.Tensor], torch.Tensor]


class ReferenceFFN:
    """The forward of one FFN, `[batch, length, hidden_size]`."""

    def __init__(
        self,
        module: Any,
        method: Any,
        ratio: float,
        context: torch.Tensor,
        real: torch.Tensor,
        passes: Collection[int],
    ) -> None:
        """`real` says which positions count for the statistics."""
        self.ffn = weights_of(module)
        delta = method.partition_fraction / 2 if method.pruned_share is None else ratio - method.pruned_share
        self.sizes = ref.sizes(self.ffn.channels, ratio, delta, method.multiple)
        self.method = method
        self.context = context
        self.real = real
        self.passes = passes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        batch, length = x.shape[:2]
        assert self.context.shape == self.real.shape == (batch, length), "a forward over another sequence"
        together = [list(range(batch))] if self.method.scope == "batch" else [[row] for row in range(batch)]
        is_context = self.context.tolist()
        outputs = torch.full_like(x, torch.nan)
        for rows in together:
            sums: torch.Tensor | None = None
            up_sums: torch.Tensor | None = None
            first = collected = 0
            prompted = False
            for start, stop in stretches(self.context, self.passes):
                before = sums
                sums = self._statistics(ref.add_rows, x, rows, start, stop, sums)
                up_sums = self._statistics(ref.add_up_rows, x, rows, start, stop, up_sums)
                prompted |= sums is not before
                parts = None if sums is None else ref.partition(self.ffn, sums, self.sizes, up_sums)
                for row in rows:
                    columns = [t for t in range(start, stop) if is_context[row][t]]
                    if columns:
                        outputs[row, columns] = ref.prefill_rows(self.ffn, x[row, columns], parts, self.method.prefill)
                for t in range(start, stop):
                    decode = [row for row in rows if not is_context[row][t]]
                    first = first if decode else t + 1
                    if not decode:
                        continue
                    every, generated = self.method.refresh, t - first
                    collecting = bool(every) and not prompted and collected < every
                    if collecting or (every and generated > 0 and generated % every == 0):
                        weight = 1 if collecting else every
                        sums = weight * self._one(ref.add_rows, x, decode, t) + (0 if sums is None else sums)
                        up_sums = weight * self._one(ref.add_up_rows, x, decode, t) + (
                            0 if up_sums is None else up_sums
                        )
                        parts = ref.partition(self.ffn, sums, self.sizes, up_sums)
                        collected += 1
                    outputs[decode, t] = ref.decode_step(
                        self.ffn,
                        x[decode, t],
                        None if collecting else parts,
                        self.method.selection,
                        self.method.up_share,
                    )
        return outputs

    def _one(self, add: Add, x: torch.Tensor, rows: list[int], t: int) -> torch.Tensor:
        """The squares of one time step."""
        return add(self.ffn, ref.no_rows(self.ffn), x[rows, t])

    def _statistics(
        self,
        add: Add,
        x: torch.Tensor,
        rows: list[int],
        start: int,
        stop: int,
        sums: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The sums of squares after this pass; None as long as there was no real prefill position."""
        for row in rows:
            counts = self.context[row, start:stop] & self.real[row, start:stop]
            if counts.any():
                sums = add(self.ffn, ref.no_rows(self.ffn) if sums is None else sums, x[row, start:stop][counts])
        return sums


def weights_of(module: Any) -> ref.Weights:
    """The weights of a zoo model's FFN."""
    act = next(getattr(module, name) for name in ("act_fn", "activation_fn", "act") if hasattr(module, name))
    if hasattr(module, "gate_up_proj"):
        (gate, up), (gate_bias, up_bias) = halves(module.gate_up_proj.weight), halves(module.gate_up_proj.bias)
        down = module.down_proj
        return ref.Weights(gate, gate_bias, up, up_bias, down.weight, down.bias, act)
    if hasattr(module, "gate_proj"):
        gate, up, down = module.gate_proj, module.up_proj, module.down_proj
        return ref.Weights(gate.weight, gate.bias, up.weight, up.bias, down.weight, down.bias, act)
    pairs = [("up_proj", "down_proj"), ("dense_h_to_4h", "dense_4h_to_h"), ("c_fc", "c_proj"), ("fc1", "fc2")]
    up, down = next((getattr(module, a), getattr(module, b)) for a, b in pairs if hasattr(module, a))
    return ref.Weights(None, None, up.weight, up.bias, down.weight, down.bias, act)


def halves(stacked: torch.Tensor | None) -> Sequence[torch.Tensor | None]:
    return (None, None) if stacked is None else stacked.chunk(2)


def mlp_ratio(model: Any, method: Any, index: int) -> float:
    """The MLP ratio of a layer, from the overall target if it is not given (section 1.8)."""
    if method.ratios is not None:
        return method.ratios[index]
    if method.mlp_ratio is not None:
        return method.mlp_ratio
    layer = layers_of(model)[index]
    if hasattr(layer.mlp, "experts"):
        return mixture_ratio(method, layer)
    attention = next(
        child for name, child in layer.named_children() if name in ("self_attn", "attention", "self_attention")
    )
    in_attention, in_ffn = linear_weights(attention), linear_weights(layer.mlp)
    return method.ratio * (in_attention + in_ffn) / in_ffn


def mixture_ratio(method: Any, layer: Any) -> float:
    """Of the attention, and of the routed experts that a token uses (Table 8)."""
    in_attention = linear_weights(layer.self_attn)
    router = layer.mlp.gate if hasattr(layer.mlp, "gate") else layer.mlp.router
    one = experts_of(layer.mlp.experts)[0]
    in_experts = router.top_k * (one.gate.numel() + one.up.numel() + one.down.numel())
    if method.shared_experts and hasattr(layer.mlp, "shared_expert"):
        in_experts += linear_weights(layer.mlp.shared_expert)
    return method.ratio * (in_attention + in_experts) / in_experts


def linear_weights(module: nn.Module) -> int:
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))
