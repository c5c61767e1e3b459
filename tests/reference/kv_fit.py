"""Fitted K/V projections the slow, obviously-right way: every token a row, and a least-squares solver.

The keys and values that the full model's own linear layers give, and those that they give for what arrives when the
skipped layers are gated, are taken off these modules; nothing of the library is used.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from reference.prefill_oracle import gated_logits, layers_of

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def linear_modules(layer: Any) -> list[Any]:
    """The modules that make keys and values."""
    for attention in ("self_attn", "attention", "self_attention"):
        if hasattr(layer, attention):
            owner = getattr(layer, attention)
    if hasattr(owner, "k_proj"):
        return [owner.k_proj, owner.v_proj]
    return [owner.qkv_proj if hasattr(owner, "qkv_proj") else owner.query_key_value]


def keys_and_values(model: Any, outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[tokens, features]`, all keys, then all values, from what these modules answer, `[tokens, ...]` each."""
    if len(outputs) == 2:
        return torch.cat(tuple(outputs), dim=-1)
    config, fused = model.config, outputs[0]
    heads, size = config.num_attention_heads, config.hidden_size // config.num_attention_heads
    if config.model_type == "phi3":
        return fused[:, heads * size :]
    blocks = fused.split(size, dim=-1)
    if config.model_type == "gpt_neox":
        keys, values = [blocks[3 * head + 1] for head in range(heads)], [blocks[3 * head + 2] for head in range(heads)]
    elif config.new_decoder_architecture:
        shared = heads // config.num_kv_heads  # queries of a group, then its key and its value
        starts = [(head // shared) * (shared + 2) + shared for head in range(heads)]
        keys, values = [blocks[start] for start in starts], [blocks[start + 1] for start in starts]
    else:
        keys, values = [blocks[heads]], [blocks[heads + 1]]
    return torch.cat(keys + values, dim=-1)


def rows_of(model: Any, skipped: Collection[int], texts: Sequence[torch.Tensor]) -> dict[int, Rows]:
    """For each skipped layer: what its linear layers read in the pruned model, and their answers there and in the full
    one, a row for every token of the texts (`[batch, length]` each)."""
    collected: dict[int, list[Rows]] = {index: [] for index in skipped}
    for ids in texts:
        full, pruned = _seen(model, skipped, ids, ()), _seen(model, skipped, ids, skipped)
        for index in skipped:
            inputs, answers = pruned[index]
            collected[index].append((inputs, answers, full[index][1]))
    return {index: tuple(map(torch.cat, zip(*parts, strict=True))) for index, parts in collected.items()}


def _seen(
    model: Any, watched: Collection[int], ids: torch.Tensor, skipped: Collection[int]
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    seen: dict[Any, tuple[torch.Tensor, torch.Tensor]] = {}

    def hook(module: Any, args: Any, output: Any) -> None:
        seen[module] = args[0].flatten(0, 1), output.flatten(0, 1)

    modules = {index: linear_modules(layers_of(model)[index]) for index in watched}
    hooks = [module.register_forward_hook(hook) for parts in modules.values() for module in parts]
    gated_logits(model, skipped, ids.shape[1], input_ids=ids)
    for handle in hooks:
        handle.remove()
    return {
        index: (seen[parts[0]][0], keys_and_values(model, [seen[part][1] for part in parts]))
        for index, parts in modules.items()
    }


def fit(rows: Rows, weights: torch.Tensor, ridge: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Correction `[features, hidden_size]` and bias `[features]` by least squares over rows, and rows for the ridge."""
    inputs, answers, targets = rows
    size = inputs.shape[1]
    penalty = ridge * (weights[:, None] * inputs.square()).sum(0).mean()
    root = weights.sqrt()[:, None]
    ones = torch.ones(len(inputs), 1, dtype=inputs.dtype)
    left = torch.cat((root * torch.cat((inputs, ones), 1), penalty.sqrt() * torch.eye(size, size + 1).to(inputs)))
    right = torch.cat((root * (targets - answers), torch.zeros(size, targets.shape[1], dtype=inputs.dtype)))
    solution = torch.linalg.lstsq(left, right).solution.T
    return solution[:, :size], solution[:, size]
