"""The arguments a decoder layer is called with, and the same call for a part of its rows."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from stageprune.errors import UnsupportedModelError
from stageprune.stages import CACHE_NAMES


def execution_device(module: nn.Module) -> torch.device | None:
    """Where accelerate makes a module compute, when it spread the model over devices or offloads it; else None."""
    device = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    return None if device is None else torch.device(device)


class LayerSignature:
    """The parameters of one decoder layer's `forward`.

    Args:
        layer: the decoder layer.
        config: the text model's configuration, which knows the attention backend.
    """

    def __init__(self, layer: nn.Module, config: Any) -> None:
        self._config = config
        # Of the class: other libraries' wrappers on the instance need not tell their parameters.
        _, *parameters = inspect.signature(type(layer).forward).parameters.values()
        self.positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        self.cache_name = next((name for name in CACHE_NAMES if name in self.positional), None)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> LayerCall:
        """The call as one dictionary of named arguments."""
        arguments = dict(zip(self.positional, args, strict=False)) | kwargs
        return LayerCall(arguments, self.cache_name, str(getattr(self._config, "_attn_implementation", "eager")))


class LayerCall:
    """One call of a decoder layer. Rows are positions of the sequence, `length` of them."""

    def __init__(self, arguments: dict[str, Any], cache_name: str | None, backend: str) -> None:
        self.arguments = arguments
        self._backend = backend
        self._cache_name = next((name for name in CACHE_NAMES if arguments.get(name) is not None), cache_name)

    @property
    def hidden_states(self) -> torch.Tensor:
        """The layer's input, `[batch, length, hidden_size]`."""
        hidden_states = self.arguments["hidden_states"]
        assert isinstance(hidden_states, torch.Tensor)
        return hidden_states

    @property
    def cache(self) -> Any:
        """The K/V cache, or None."""
        return None if self._cache_name is None else self.arguments.get(self._cache_name)

    @property
    def attention_mask(self) -> torch.Tensor | None:
        """The mask as the attention backend gets it."""
        mask = self.arguments.get("attention_mask")
        if mask is None or isinstance(mask, torch.Tensor):
            return mask
        raise UnsupportedModelError(
            f"the attention mask is a {type(mask).__name__} (flex attention?), whose rows cannot be selected; load the "
            "model with attn_implementation='sdpa', 'eager' or 'flash_attention_2'"
        )

    def positions(self, rows: slice, length: int) -> Any:
        """The rotary embedding of some rows, in the structure the layer gets it."""
        return _position_rows(self.arguments.get("position_embeddings"), rows, length)

    def decode_rows(self, hidden_states: torch.Tensor, cache: Any, prefill: int, length: int) -> dict[str, Any]:
        """Arguments of the same call for the rows from `prefill` on, whose `hidden_states` are given.

        Args:
            hidden_states: `[batch, length - prefill, hidden_size]`.
            cache: what the layer shall see as its cache.
            prefill: how many leading rows are left out.
            length: how many rows the whole call has.
        """
        if self._cache_name is None:
            raise UnsupportedModelError("the decoder layer's forward takes no K/V cache argument that we know")
        rows = slice(prefill, length)
        arguments = dict(self.arguments)
        arguments["hidden_states"] = hidden_states
        arguments[self._cache_name] = cache
        arguments["attention_mask"] = self._mask_rows(hidden_states, prefill, length)
        if "position_embeddings" in arguments:
            arguments["position_embeddings"] = self.positions(rows, length)
        position_ids = arguments.get("position_ids")
        if isinstance(position_ids, torch.Tensor) and position_ids.shape[-1] == length:
            arguments["position_ids"] = position_ids[..., rows]
        return arguments

    def _mask_rows(self, hidden_states: torch.Tensor, prefill: int, length: int) -> torch.Tensor | None:
        mask = self.attention_mask
        if mask is not None:
            # A 2-D mask (flash attention) speaks of keys only, and such backends align queries to the last keys.
            return mask[..., prefill:length, :] if mask.ndim == 4 else mask
        if length - prefill == 1 or self._backend not in ("sdpa", "eager"):
            return None
        # No mask means "causal" to the SDPA backend, which then aligns the first query with the first key: right for
        # all rows at once, wrong for the last few. Nothing is padded or cached in this case: keys = all rows.
        keys = torch.arange(length, device=hidden_states.device)
        allowed = keys <= torch.arange(prefill, length, device=hidden_states.device)[:, None]
        if self._backend == "sdpa":
            return allowed[None, None]
        additive = torch.zeros(allowed.shape, dtype=hidden_states.dtype, device=hidden_states.device)
        return additive.masked_fill(~allowed, torch.finfo(hidden_states.dtype).min)[None, None]


def _position_rows(positions: Any, rows: slice, length: int) -> Any:
    if isinstance(positions, tuple):
        return tuple(_position_rows(part, rows, length) for part in positions)
    if isinstance(positions, torch.Tensor) and positions.ndim >= 2 and positions.shape[-2] == length:
        return positions[..., rows, :]
    return positions
