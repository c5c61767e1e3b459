"""How each architecture turns the hidden states that enter a decoder layer into the keys and values it caches.

A `KVProjection` repeats what a layer's own attention does up to `cache.update`, without the query (Eq. 14 of
arXiv 2602.03295): norm, K and V projection, key norm, rotary embedding. One class per shape of attention; which class
(and which variant of it) fits a layer is not believed but checked, see `verify.py`.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import nn
from torch.nn import functional as F

KeysValues: TypeAlias = tuple[torch.Tensor, torch.Tensor]
KeyNorm: TypeAlias = Literal["none", "per head", "all heads", "after rotary"]

_INPUT_NORMS = ("ln_attn", "input_layernorm")
_KEY_NORMS = ("k_norm", "key_layernorm", "k_layernorm", "key_norm")


class KVProjection(ABC):
    """Keys and values of a layer from the hidden states that enter it, in three steps."""

    def __call__(self, layer: nn.Module, hidden_states: torch.Tensor, positions: Any) -> KeysValues:
        """Project.

        Args:
            layer: the decoder layer whose weights are used.
            hidden_states: its input, `[batch, length, hidden_size]`.
            positions: the rotary embedding `(cos, sin)` of these rows, each `[batch or 1, length, rotary_dim]`;
                None where the architecture has none.

        Returns:
            Keys and values as the layer caches them, each `[batch, num_key_value_heads, length, head_dim]`.
        """
        keys, values = self.linear(layer, self.normed(layer, hidden_states))
        return self.finish(layer, keys, values, positions)

    def normed(self, layer: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        """What the linear layers read, `[batch, length, hidden_size]`: the layer's own input norm, if it has one."""
        normed: torch.Tensor = _input_norm(layer)(hidden_states)
        return normed

    @abstractmethod
    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """Keys and values before key norm and rotary embedding, each `[batch, length, heads * head_dim]`."""

    @abstractmethod
    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """From what `linear` gives to what the layer caches."""

    @abstractmethod
    def weights(self, layer: nn.Module) -> int:
        """How many weights each token is multiplied with."""


def candidates(layer: nn.Module) -> Iterator[KVProjection]:
    """The descriptions that could fit a layer, likeliest first; none when the layer has no attention we know."""
    attention = getattr(layer, "self_attn", None)
    if attention is not None and hasattr(attention, "k_proj") and hasattr(attention, "v_proj"):
        for rotary in (True, False):
            for key_norm in _key_norms(attention):
                yield SeparateKV(rotary=rotary, key_norm=key_norm)
        if hasattr(sys.modules[type(attention).__module__], "_apply_rotary_emb"):
            yield from (SeparateKV(key_norm=key_norm, halves=True) for key_norm in _key_norms(attention))
    if attention is not None and hasattr(attention, "qkv_proj"):
        yield FusedKV()
    attention = getattr(layer, "attention", None)
    if attention is not None and hasattr(attention, "query_key_value"):
        yield InterleavedKV()
    attention = getattr(layer, "self_attention", None)
    if attention is not None and hasattr(attention, "query_key_value") and hasattr(attention, "_split_heads"):
        yield FalconKV()


@dataclass(frozen=True)
class SeparateKV(KVProjection):
    """Llama-shaped attention: `self_attn.k_proj` and `v_proj`, after `input_layernorm` where there is one.

    Args:
        rotary: whether keys are rotated (SmolLM3 and Cohere2 have layers without positions).
        key_norm: where the key norm sits: per head (Qwen3, Gemma3, Cohere), over all heads at once before they are
            split (OLMo2), or per head after the rotary embedding (HunYuan).
        halves: whether cosines and sines are given for half of a head that is rotated as a whole (GPT-OSS), not for the
            part of it that is rotated.
    """

    rotary: bool = True
    key_norm: KeyNorm = "none"
    halves: bool = False

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        return attention.k_proj(normed), attention.v_proj(normed)

    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        norm = _key_norm_module(attention)
        if self.key_norm == "all heads":
            keys = norm(keys)
        keys, values = (part.view(*part.shape[:-1], -1, attention.head_dim) for part in (keys, values))
        if self.key_norm == "per head":
            keys = norm(keys)
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if self.rotary:
            keys = _rotate(attention, keys, positions, whole=self.halves)
        if self.key_norm == "after rotary":
            keys = norm(keys)
        return keys, values

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        return attention.k_proj.in_features * (attention.k_proj.out_features + attention.v_proj.out_features)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FusedKV(KVProjection):
    """Phi3-shaped attention: one `qkv_proj` whose output is all queries, then all keys, then all values."""

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        queries = attention.config.num_attention_heads * attention.head_dim
        keys, values = _linear_rows(attention.qkv_proj, normed, slice(queries, None)).chunk(2, dim=-1)
        return keys, values

    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        keys, values = _by_head(keys, attention.head_dim), _by_head(values, attention.head_dim)
        return _rotate(attention, keys, positions), values

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        attention: Any = layer.self_attn
        queries = attention.config.num_attention_heads * attention.head_dim
        return attention.qkv_proj.in_features * (attention.qkv_proj.out_features - queries)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class InterleavedKV(KVProjection):
    """GPT-NeoX-shaped attention: one `query_key_value` whose output holds query, key and value head by head."""

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.attention
        head_dim = attention.head_size
        rows = torch.arange(attention.query_key_value.out_features, device=normed.device)
        rows = rows.view(-1, 3, head_dim)[:, 1:].reshape(-1)
        fused = _linear_rows(attention.query_key_value, normed, rows)
        keys, values = fused.view(*normed.shape[:-1], -1, 2, head_dim).unbind(-2)
        return keys.flatten(-2), values.flatten(-2)

    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.attention
        keys, values = _by_head(keys, attention.head_size), _by_head(values, attention.head_size)
        return _rotate(attention, keys, positions), values

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        attention: Any = layer.attention
        linear = attention.query_key_value
        return linear.in_features * linear.out_features * 2 // 3  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FalconKV(KVProjection):
    """Falcon-shaped attention: one `query_key_value`, split by the module's own `_split_heads`."""

    def linear(self, layer: nn.Module, normed: torch.Tensor) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attention
        _, keys, values = attention._split_heads(attention.query_key_value(normed))
        return keys.flatten(-2), values.flatten(-2)

    def finish(self, layer: nn.Module, keys: torch.Tensor, values: torch.Tensor, positions: Any) -> KeysValues:
        """See `KVProjection`."""
        attention: Any = layer.self_attention
        keys, values = _by_head(keys, attention.head_dim), _by_head(values, attention.head_dim)
        return (keys if positions is None else _rotate(attention, keys, positions)), values

    def weights(self, layer: nn.Module) -> int:
        """See `KVProjection`."""
        attention: Any = layer.self_attention
        linear = attention.query_key_value
        return linear.in_features * linear.out_features  # type: ignore[no-any-return]


def _by_head(features: torch.Tensor, head_dim: int) -> torch.Tensor:
    """`[batch, length, heads * head_dim]` as `[batch, heads, length, head_dim]`."""
    return features.view(*features.shape[:-1], -1, head_dim).transpose(1, 2)


def _input_norm(layer: nn.Module) -> Any:
    """The norm in front of the attention; none where norms follow their block (OLMo2)."""
    for name in _INPUT_NORMS:
        norm = getattr(layer, name, None)
        if norm is not None:
            return norm
    return nn.Identity()


def _key_norm_module(attention: nn.Module) -> Any:
    for name in _KEY_NORMS:
        norm = getattr(attention, name, None)
        if norm is not None:
            return norm
    return None


def _key_norms(attention: Any) -> tuple[KeyNorm, ...]:
    """The places where the key norm may sit, by the shape of its weight."""
    norm = _key_norm_module(attention)
    if norm is None or getattr(attention, "use_qk_norm", True) is False:
        return ("none",)
    weight = getattr(norm, "weight", None)
    if weight is not None and weight.ndim == 1 and weight.numel() != attention.head_dim:
        return ("all heads",)
    return ("per head", "after rotary")


def _rotate(attention: Any, keys: torch.Tensor, positions: Any, whole: bool = False) -> torch.Tensor:
    """Apply the attention module's own rotary embedding to the keys, `[batch, heads, length, head_dim]`.

    Heads are rotated in as many dimensions as there are cosines, or as a whole.
    """
    cos, sin = positions
    module = sys.modules[type(attention).__module__]
    if cos.ndim == 4:  # older Qwen2-VL: [3 axes, batch, length, head_dim]
        sections = attention.config.rope_parameters["mrope_section"]
        return module.apply_multimodal_rotary_pos_emb(keys[:, :0], keys, cos, sin, sections)[1]  # type: ignore[no-any-return]
    rotate: Callable[..., KeysValues] = module.apply_rotary_pos_emb
    rotary_dim = cos.shape[-1]
    no_queries = keys[:, :0]
    if whole or rotary_dim >= keys.shape[-1]:
        return rotate(no_queries, keys, cos, sin)[1]
    rotated = rotate(no_queries[..., :rotary_dim], keys[..., :rotary_dim], cos, sin)[1]
    return torch.cat((rotated, keys[..., rotary_dim:]), dim=-1)


def _linear_rows(linear: nn.Module, inputs: torch.Tensor, rows: slice | torch.Tensor) -> torch.Tensor:
    """Only these output features of a linear layer; others (quantized, offloaded) compute all and are sliced."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks or "forward" in vars(linear)
    if type(linear) is nn.Linear and not hooked:
        bias = None if linear.bias is None else linear.bias[rows]
        return F.linear(inputs, linear.weight[rows], bias)
    return linear(inputs)[..., rows]  # type: ignore[no-any-return]
