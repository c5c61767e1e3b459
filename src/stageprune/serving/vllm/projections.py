"""The K/V projection of a skipped layer inside vLLM, the layer's own or a fitted one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.linear import ReplicatedLinear, UnquantizedLinearMethod

from stageprune.errors import UnsupportedModelError
from stageprune.prefill.fitted import OwnWeights
from stageprune.prefill.projections import KVProjections, check_weights, weights_identity
from stageprune.serving.vllm import compat

_KV_PARTS = ("self_attn.k_proj", "self_attn.v_proj")
_KV_NAMES = [f"{part}.{kind}" for part in _KV_PARTS for kind in ("weight", "bias")]


class KeyValueLinear(nn.Module):
    """Keys and values without queries.

    vLLM holds the three projections as one matrix. Its lower rows, keys and values, are a linear layer of their own
    here that shares its memory; where the matrix is quantized, all of it is used and the queries are left.

    Args:
        attention: the layer's.
        prefix: the name of this module.
    """

    def __init__(self, attention: Any, prefix: str) -> None:
        super().__init__()
        self.linear: ReplicatedLinear | None = None
        own = attention.qkv_proj
        if isinstance(own.quant_method, UnquantizedLinearMethod):
            self.linear = ReplicatedLinear(
                attention.hidden_size, 2 * attention.kv_size, bias=own.bias is not None, prefix=prefix, disable_tp=True
            )

    def bind(self, attention: Any, fitted: tuple[torch.Tensor, torch.Tensor] | None) -> None:
        """Take the weights.

        Args:
            attention: the layer's, with its weights loaded.
            fitted: weight `[2 * kv_size, hidden_size]` and bias `[2 * kv_size]`, of this worker's heads; None for the
                layer's own.

        Raises:
            UnsupportedModelError: if fitted ones cannot be used.
        """
        if self.linear is None:
            if fitted is not None:
                raise UnsupportedModelError("fitted K/V projections cannot be used with a quantized checkpoint")
            return
        own, rows = attention.qkv_proj, slice(attention.q_size, None)
        if fitted is None:
            self.linear.weight.data = own.weight.data[rows]
            if own.bias is not None:
                self.linear.bias.data = own.bias.data[rows]
            return
        weight, bias = (part.to(own.weight) for part in fitted)
        self.linear.weight.data = weight
        if self.linear.bias is None:
            self.linear.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
        else:
            self.linear.bias.data = bias

    def copy(self) -> None:
        """Stop sharing memory with the layer, which is about to give up its own.

        Raises:
            UnsupportedModelError: if the layer's own matrix is needed.
        """
        if self.linear is None:
            raise UnsupportedModelError(
                "an instance that only encodes prompts needs a checkpoint that is not quantized"
            )
        self.linear.weight.data = self.linear.weight.data.clone()

    def forward(
        self, attention: Any, normed: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as the layer caches them, each `[rows, heads * head_dim]`.

        Args:
            attention: the layer's.
            normed: what its linear layers read, `[rows, hidden_size]`.
            positions: `[rows]`.
        """
        if self.linear is not None:
            features, _ = self.linear(normed)
        else:
            features = attention.qkv_proj(normed)[0][..., attention.q_size :]
        keys, values = features.split([attention.kv_size, attention.kv_size], dim=-1)
        norm = getattr(attention, "k_norm", None)
        if norm is not None:
            heads = keys.reshape(len(keys), -1, attention.head_dim)
            keys = norm(heads).reshape(keys.shape)
        keys, _ = attention.rotary_emb(positions, keys.contiguous(), None)
        return keys, values


class FittedWeights:
    """Fitted K/V projections, put together from a folder's corrections and the checkpoint's own weights.

    Every worker reads the whole checkpoint, so each can check that it is the model that they were fitted for.

    Args:
        folder: that `stageprune calibrate` wrote.

    Raises:
        ResultFileError: if the folder cannot be read.
    """

    def __init__(self, folder: str) -> None:
        self._projections = KVProjections.load(folder)
        self._own: dict[tuple[int, str], torch.Tensor] = {}

    def see(self, layer: int, name: str, weight: torch.Tensor) -> None:
        """Look at a weight of the checkpoint."""
        if layer in self._projections.layers and name in _KV_NAMES:
            self._own[layer, name] = weight.detach().cpu()

    def check(self) -> None:
        """Refuse another model than the one that they were fitted for.

        Raises:
            UnsupportedModelError: says what differs.
        """
        own = {index: self._weights(index) for index in self._projections.layers}
        check_weights(self._projections.record["model"], weights_identity(own))

    def of(self, layer: int, attention: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight `[2 * kv_size, hidden_size]` and bias `[2 * kv_size]` of this worker's heads, float64.

        Args:
            layer: its index.
            attention: of the layer.
        """
        own, correction = self._weights(layer), self._projections.corrections[layer]
        rank, workers = compat.tensor_parallel()
        first = rank * attention.total_num_kv_heads // workers * attention.head_dim
        rows = torch.arange(first, first + attention.kv_size)
        rows = torch.cat((rows, rows + own.keys))
        return (own.weight + correction.whole)[rows], (own.bias + correction.bias.double())[rows]

    def _weights(self, layer: int) -> OwnWeights:
        try:
            keys, values = (self._own[layer, f"{part}.weight"].double() for part in _KV_PARTS)
        except KeyError as error:
            raise UnsupportedModelError(
                f"fitted K/V projections cannot be used with this checkpoint: it has no "
                f"{error.args[0][1]} in layer {layer}"
            ) from error
        biases = [
            self._own.get((layer, f"{part}.bias"), torch.zeros(len(weight))).double()
            for part, weight in zip(_KV_PARTS, (keys, values), strict=True)
        ]
        return OwnWeights(torch.cat((keys, values)), torch.cat(biases), len(keys))
