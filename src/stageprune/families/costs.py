"""How many floating-point operations the stages of a model need: the yardstick for measured speed-ups.

Matrix products only (linear layers, attention scores and their use), a multiply-add counted as two; causal attention
counts the pairs that are really attended to, within the sliding window where there is one. Norms, rotary embeddings
and activations are left out, as usual.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from stageprune.families.decoder import Decoder
from stageprune.families.experts import active_weights, experts_per_token, is_block
from stageprune.families.kv import candidates


@dataclass(frozen=True)
class LayerCost:
    """The cost of one decoder layer.

    Attributes:
        linear: weights that each token is multiplied with; of routed experts, those of the experts that it uses.
        kv: those of them that project keys and values.
        attention: multiply-adds of each attended (query, key) pair.
        window: how many keys a query sees at most; None for all.
        cached: values in the K/V cache for each position.
    """

    linear: int
    kv: int
    attention: int
    window: int | None
    cached: int

    def flops(self, rows: int, past: int) -> int:
        """Of `rows` new positions on top of `past` cached ones."""
        return 2 * (rows * self.linear + _pairs(rows, past, self.window) * self.attention)

    def values_read(self, past: int) -> int:
        """Weights and cached values that one new position on top of `past` cached ones reads."""
        return self.linear + self.cached * (past if self.window is None else min(past, self.window))

    def kv_flops(self, rows: int) -> int:
        """Of projecting keys and values for `rows` positions, and nothing else."""
        return 2 * rows * self.kv


def layer_costs(decoder: Decoder) -> list[LayerCost]:
    """The cost of each decoder layer, from its modules' shapes; works on the meta device."""
    config = decoder.config
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    kinds = getattr(config, "layer_types", None)
    costs = []
    for index, layer in enumerate(decoder.layers):
        sliding = kinds is not None and kinds[index] == "sliding_attention"
        window = getattr(config, "sliding_window", None) if sliding or kinds is None else None
        project = next(candidates(layer), None)
        kv = 0 if project is None else project.weights(layer)
        costs.append(LayerCost(linear_weights(layer), kv, 2 * heads * head_dim, window, kv // config.hidden_size))
    return costs


def linear_weights(module: nn.Module) -> int:
    """Weights of all linear layers inside a module (also quantized ones, by their declared shape).

    Of routed experts, as many count as a token uses; routers count, as their scores are matrix products, too.
    """
    columns, rows = getattr(module, "in_features", None), getattr(module, "out_features", None)
    own = rows * columns if isinstance(rows, int) and isinstance(columns, int) else 0
    if not is_block(module):
        return own + sum(linear_weights(child) for child in module.children())
    experts: nn.Module = module.experts  # type: ignore[assignment]
    others = [child for child in module.children() if child is not experts]
    active = active_weights(experts, experts_per_token(module))
    return own + active + sum(linear_weights(child) + _router_weights(child) for child in others)


def _router_weights(module: nn.Module) -> int:
    """Of a module that holds its matrix itself, which is how transformers 5 writes routers."""
    weight = getattr(module, "weight", None)
    bare = isinstance(weight, torch.Tensor) and weight.ndim == 2 and not hasattr(module, "in_features")
    return weight.numel() if bare and isinstance(weight, torch.Tensor) else 0


def head_weights(decoder: Decoder) -> int:
    """Weights of the language-model head."""
    head = decoder.model.get_output_embeddings()  # type: ignore[operator]
    return 0 if head is None else linear_weights(head)


def prompt_flops(decoder: Decoder, length: int, context_free: Collection[int] = ()) -> int:
    """Up to the first generated token, for a prompt of `length` tokens on an empty cache.

    Args:
        decoder: the model.
        length: of the prompt, N.
        context_free: layers that only project keys and values for the first N - 1 positions.
    """
    total = 2 * head_weights(decoder)
    for index, cost in enumerate(layer_costs(decoder)):
        if index in context_free:
            total += cost.kv_flops(length - 1) + cost.flops(1, length - 1)
        else:
            total += cost.flops(length, 0)
    return total


def values_of_a_step(decoder: Decoder, past: int) -> int:
    """Weights and cached values read to generate one token for one sequence, after `past` cached positions.

    Times the bytes of a value: the yardstick for decoding, which takes the time of reading them.
    """
    return head_weights(decoder) + sum(cost.values_read(past) for cost in layer_costs(decoder))


def _pairs(rows: int, past: int, window: int | None) -> int:
    """How many (query, key) pairs `rows` causal queries after `past` keys attend to."""
    if window is None:
        return rows * past + rows * (rows + 1) // 2
    full = max(0, min(rows, past + rows - window))  # rows that see a full window
    growing = rows - full
    return full * window + growing * past + growing * (growing + 1) // 2
