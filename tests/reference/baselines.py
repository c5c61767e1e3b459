"""The baselines written out, for models of the shape of Llama's: one token, one channel, one weight at a time."""

from __future__ import annotations

from typing import Any

import torch


def hidden_states(model: Any, text: list[int]) -> list[torch.Tensor]:
    """What enters each layer, and what leaves the last one, `[tokens, hidden_size]` each."""
    seen: list[torch.Tensor] = []
    hooks = [
        layer.register_forward_hook(
            lambda module, args, kwargs, output: seen.extend([args[0][0], output[0]]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    model.model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    return [*seen[::2], seen[-1]]


def block_influence(model: Any, texts: list[list[int]]) -> list[float]:
    sums, tokens = [0.0] * len(model.model.layers), 0
    for text in texts:
        states = hidden_states(model, text)
        tokens += len(text)
        for index in range(len(sums)):
            for before, after in zip(states[index], states[index + 1], strict=True):
                sums[index] += float(before @ after / (before @ before).sqrt() / (after @ after).sqrt())
    return [1 - one / tokens for one in sums]


def ffn_inputs(model: Any, texts: list[list[int]], index: int) -> torch.Tensor:
    """What enters a layer's FFN, `[tokens of all texts, hidden_size]`."""
    rows: list[torch.Tensor] = []
    hook = model.model.layers[index].mlp.register_forward_pre_hook(lambda module, args: rows.append(args[0][0]))
    for text in texts:
        model.model(torch.tensor([text]), use_cache=False)
    hook.remove()
    return torch.cat(rows)


def activations(model: Any, index: int, inputs: torch.Tensor) -> torch.Tensor:
    mlp = model.model.layers[index].mlp
    return torch.stack([mlp.act_fn(mlp.gate_proj(row)) * mlp.up_proj(row) for row in inputs])


def channel_scores(model: Any, kind: str, texts: list[list[int]], index: int) -> list[float]:
    """Of a layer's channels."""
    weight = model.model.layers[index].mlp.down_proj.weight
    hidden = activations(model, index, ffn_inputs(model, texts, index)) if texts else None
    scores = []
    for channel in range(weight.shape[1]):
        column = [float(value) for value in weight[:, channel]]
        if kind == "magnitude":
            scores.append(sum(value**2 for value in column) ** 0.5)
            continue
        assert hidden is not None
        values = [float(value) for value in hidden[:, channel]]
        if kind == "wanda-sp":
            norm = sum(value**2 for value in values) ** 0.5
            scores.append(sum(abs(weight) * norm for weight in column) / len(column))
        elif kind == "flap":
            mean = sum(values) / len(values)
            variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            scores.append(variance * sum(value**2 for value in column))
    return scores


def logits_with_channels(
    model: Any, kept: dict[int, list[int]], biases: dict[int, torch.Tensor], ids: torch.Tensor
) -> torch.Tensor:
    """Of a model whose FFNs have the other channels set to zero, and something added to their output."""

    def replaced(index: int) -> Any:
        mask = torch.zeros(model.config.intermediate_size, dtype=model.dtype)
        mask[kept[index]] = 1
        return lambda module, args: (args[0] * mask,)

    hooks = []
    for index in kept:
        mlp = model.model.layers[index].mlp
        hooks.append(mlp.down_proj.register_forward_pre_hook(replaced(index)))
        if index in biases:
            hooks.append(mlp.register_forward_hook(lambda m, a, output, index=index: output + biases[index]))
    logits = model(ids).logits
    for hook in hooks:
        hook.remove()
    return logits


def wanda_mask(weight: torch.Tensor, norms: torch.Tensor, ratio: float) -> torch.Tensor:
    """True where a weight stays."""
    stays = torch.ones_like(weight, dtype=torch.bool)
    for row in range(weight.shape[0]):
        scores = [abs(float(weight[row, column])) * float(norms[column]) for column in range(weight.shape[1])]
        order = sorted(range(len(scores)), key=lambda column: scores[column])
        for column in order[: int(ratio * len(order))]:
            stays[row, column] = False
    return stays


def sliced_logits(model: Any, bases: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """SliceGPT with full matrices: the stream is projected onto the kept components where SliceGPT cuts it.

    `bases`: `[hidden_size, left]`, of each layer the attention's and the FFN's, at last the final norm's. In the
    original basis, cutting to the components of Q is multiplying with `Q Q^T`; the norm sees what is left of the
    stream.
    """
    cuts = [basis @ basis.T for basis in bases]
    layers = model.model.layers
    hooks = [model.model.embed_tokens.register_forward_hook(lambda m, a, output: output @ cuts[0])]
    states: dict[int, Any] = {}

    def attention(index: int) -> Any:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
            states[index] = output[0] @ cuts[2 * index + 1]
            return (states[index], *output[1:])

        return hook

    for index, layer in enumerate(layers):
        hooks.append(layer.self_attn.register_forward_hook(attention(index), with_kwargs=True))
        # The residual stream is cut where a block is added to it: before the FFN's norm, and behind the layer.
        own = layer.forward

        def forward(hidden: torch.Tensor, layer: Any = layer, index: int = index, **kwargs: Any) -> torch.Tensor:
            middle = (
                hidden @ cuts[2 * index + 1] + layer.self_attn(hidden_states=layer.input_layernorm(hidden), **kwargs)[0]
            )
            out = layer.mlp(layer.post_attention_layernorm(middle)) @ cuts[2 * index + 2]
            return middle @ cuts[2 * index + 2] + out

        layer.forward = forward
        del own
    logits = model(ids, use_cache=False).logits
    for layer in layers:
        del layer.forward
    for hook in hooks:
        hook.remove()
    return logits
