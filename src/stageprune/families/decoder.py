"""Where the decoder layers of a model are, and which layers cannot be skipped by their nature."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from stageprune.errors import UnsupportedModelError

_LAYER_LISTS = ("layers", "h", "blocks")
_RECURRENT_PARTS = ("linear_attn", "mamba", "mixer", "ssm", "conv", "temporal_block", "attention_ssm", "recurrent")


@dataclass(frozen=True)
class Decoder:
    """A causal language model, taken apart as far as pruning needs it.

    Attributes:
        model: the module whose `generate` and `forward` the user calls.
        body: the module that owns the layers and runs them one after the other.
        layers: the decoder layers in order.
        config: the text model's configuration.
        whole: layers whose output the body reads at all positions before the next layer runs (DeepStack); their output
            must never be cut to some rows.
    """

    model: nn.Module
    body: nn.Module
    layers: tuple[nn.Module, ...]
    config: Any
    whole: frozenset[int] = frozenset()


def find_decoder(model: nn.Module) -> Decoder:
    """Take a model apart.

    Raises:
        UnsupportedModelError: if this is no decoder-only causal language model of transformers.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedModelError(f"expected a transformers model, got {type(model).__name__}")
    name = type(model).__name__
    if hasattr(model, "_orig_mod"):
        raise UnsupportedModelError(f"{name} is a compiled model: prune the original first, then compile it")
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        raise UnsupportedModelError(f"{name} has no transformers configuration")
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name} is an encoder-decoder model; stageprune prunes decoder-only models")
    if not (hasattr(model, "can_generate") and model.can_generate()):  # type: ignore[operator]
        raise UnsupportedModelError(
            f"{name} cannot generate (no language-model head); load it with AutoModelForCausalLM"
        )
    text = config.get_text_config()
    body = _body(model, text)
    layers = _layers(body)
    return Decoder(model, body, layers, text, _whole(body, config, len(layers)))


def refuse_shared_kv(config: Any) -> None:
    """Raise if deep layers read the keys and values of earlier ones (Gemma3n-like): they have none to project."""
    shared = getattr(config, "num_kv_shared_layers", 0)
    if shared:
        raise UnsupportedModelError(
            f"the last {shared} layers of this {config.model_type} model have no keys and values of their own "
            "(num_kv_shared_layers): they read those of earlier layers, so there is nothing to project when they are "
            "skipped"
        )


def refuse_recurrent(index: int, layer: nn.Module) -> None:
    """Raise if a layer keeps a recurrent state: skipping it would lose the state, and there is nothing to project."""
    for part in _RECURRENT_PARTS:
        if isinstance(getattr(layer, part, None), nn.Module) and not hasattr(layer, "self_attn"):
            raise UnsupportedModelError(
                f"layer {index} ({type(layer).__name__}) keeps a recurrent state ({part}) instead of keys and values; "
                "skipping it in prefill would lose the prompt"
            )


def _whole(body: nn.Module, config: Any, count: int) -> frozenset[int]:
    """Layers behind which visual features are added at the positions of their tokens (DeepStack, arXiv 2406.04334).

    Qwen3-VL adds one set of features behind each of its first layers; elsewhere it may be behind any.
    """
    if not any("deepstack" in name for name in inspect.signature(type(body).forward).parameters):
        return frozenset()
    features = getattr(getattr(config, "vision_config", None), "deepstack_visual_indexes", None)
    return frozenset(range(count if features is None else min(len(features), count)))


def _body(model: Any, config: Any) -> nn.Module:
    """The submodule that owns the list of decoder layers."""
    owners = [owner for owner in (model.get_decoder(), model.base_model) if isinstance(owner, nn.Module)]
    for owner in owners:
        if any(isinstance(getattr(owner, name, None), nn.ModuleList) for name in _LAYER_LISTS):
            return owner
    count = getattr(config, "num_hidden_layers", None)
    for owner in model.modules():
        for name in _LAYER_LISTS:
            layers = getattr(owner, name, None)
            if isinstance(layers, nn.ModuleList) and len(layers) == count:
                return owner  # type: ignore[no-any-return]
    raise UnsupportedModelError(f"no list of decoder layers found in {type(model).__name__}")


def _layers(body: nn.Module) -> tuple[nn.Module, ...]:
    for name in _LAYER_LISTS:
        layers = getattr(body, name, None)
        if isinstance(layers, nn.ModuleList) and len(layers):
            return tuple(layers)
    raise UnsupportedModelError(f"{type(body).__name__} has no decoder layers")
