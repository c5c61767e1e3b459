"""Gated inference in two stages with a real K/V cache, written out for Llama (arXiv 2602.03295, Eq. 5 and 10 to 12).

Stage one runs the prompt without its last token under the prefill gates; only its cache goes on. Stage two runs the
last prompt token and the response, one token at a time, under the decode gates, on top of that cache.
"""

from __future__ import annotations

from typing import Any

import torch


def loss(model: Any, prompt: torch.Tensor, response: torch.Tensor, prefill: Any, decode: Any) -> torch.Tensor:
    """The summed cross-entropy of a response (Eq. 12).

    Args:
        model: a Llama, untouched.
        prompt: token ids, `[1, N]`.
        response: token ids, `[1, n]`.
        prefill: the gate of each layer, `[num_hidden_layers]`.
        decode: likewise.
    """
    cache: list[Any] = [None] * len(model.model.layers)
    tokens = torch.cat((prompt, response), dim=1)
    last = prompt.shape[1] - 1
    if last:
        _run(model, tokens[:, :last], 0, prefill, cache)
    total = torch.zeros((), dtype=model.dtype)
    for position in range(last, tokens.shape[1] - 1):
        hidden = _run(model, tokens[:, position : position + 1], position, decode, cache)
        logits = model.lm_head(model.model.norm(hidden))[0, -1]
        total = total - logits.log_softmax(-1)[tokens[0, position + 1]]
    return total


def _run(model: Any, tokens: torch.Tensor, start: int, gates: Any, cache: list[Any]) -> torch.Tensor:
    x = model.model.embed_tokens(tokens)
    positions = torch.arange(start, start + tokens.shape[1])[None]
    cos, sin = model.model.rotary_emb(x, positions)
    for index, layer in enumerate(model.model.layers):
        x = x + _attention(layer, layer.input_layernorm(x), cos, sin, index, cache) * gates[index]
        x = x + layer.mlp(layer.post_attention_layernorm(x)) * gates[index]
    return x


def _attention(layer: Any, x: torch.Tensor, cos: Any, sin: Any, index: int, cache: list[Any]) -> torch.Tensor:
    attention = layer.self_attn
    batch, length, _ = x.shape
    q, k, v = (
        project(x).view(batch, length, -1, attention.head_dim).transpose(1, 2)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = (_rotated(part, cos, sin) for part in (q, k))
    if cache[index] is not None:
        k, v = (torch.cat((old, new), dim=2) for old, new in zip(cache[index], (k, v), strict=True))
    cache[index] = k, v
    k, v = (part.repeat_interleave(attention.num_key_value_groups, dim=1) for part in (k, v))
    scores = q @ k.transpose(2, 3) * attention.head_dim**-0.5
    future = torch.arange(k.shape[2]) > torch.arange(k.shape[2] - length, k.shape[2])[:, None]
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return attention.o_proj((weights @ v).transpose(1, 2).reshape(batch, length, -1))


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos[:, None] + turned * sin[:, None]
