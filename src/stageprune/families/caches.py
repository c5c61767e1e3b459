"""Caches as one decoder layer sees them: in front of the real one, or instead of it."""

from __future__ import annotations

from typing import Any

import torch


class PrefixedCache:
    """Puts the projected keys and values of the prefill rows in front of those that the layer computes itself.

    The layer runs on its decode rows and calls `update` with their keys and values; the real cache gets all rows at
    once, exactly as in a dense pass, so every kind of cache (dynamic, static, sliding, quantized) and every mask stay
    the model's own.

    Args:
        cache: the real cache, or None when the pass has none; the layer then attends to these rows alone.
        keys: of the prefill rows, `[batch, num_key_value_heads, prefill, head_dim]`.
        values: likewise.
        visible: keys beyond this many are unwritten and unmasked, and are cut off (an empty static cache without a
            mask returns its whole buffer).
    """

    def __init__(self, cache: Any, keys: torch.Tensor, values: torch.Tensor, visible: int | None = None) -> None:
        self._cache = cache
        self._prefix = (keys, values)
        self._visible = visible

    def update(self, keys: torch.Tensor, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """As `transformers.Cache.update`."""
        keys = torch.cat((self._prefix[0], keys), dim=-2)
        values = torch.cat((self._prefix[1], values), dim=-2)
        if self._cache is not None:
            keys, values = self._cache.update(keys, values, *args, **kwargs)
        if self._visible is not None:
            keys, values = keys[..., : self._visible, :], values[..., : self._visible, :]
        return keys, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class RecordingCache:
    """Keeps what a layer hands to `update`, and hands it back: a cache of this one pass."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
        """As `transformers.Cache.update` on an empty cache."""
        self.keys, self.values = keys, values
        return keys, values

    def get_seq_length(self, *_: Any) -> int:
        """Nothing is cached before this pass."""
        return 0
