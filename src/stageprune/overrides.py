"""Replace a bound method of one module instance, and take the replacement away without a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

_MARK = "__stageprune_owner__"
_REORDER = "_reorder_cache"


class MethodOverride:
    """`module.name` is answered by `wrapper(original, *args, **kwargs)` until `remove()`.

    Only the instance changes, never its class. An instance attribute that was there before (accelerate's hooks put
    one on `forward`) comes back on removal.

    Args:
        module: the instance.
        name: the method.
        wrapper: called with the original method first.
        owner: what `override_owner` shall answer for this module and name.
    """

    def __init__(self, module: nn.Module, name: str, wrapper: Callable[..., Any], owner: Any = None) -> None:
        self._module = module
        self._name = name
        self._had_attribute = name in vars(module)
        self._original = getattr(module, name)
        self._active = True
        original = self._original

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not self._active:
                return original(*args, **kwargs)
            return wrapper(original, *args, **kwargs)

        setattr(call, _MARK, owner)
        self._call = call
        setattr(module, name, call)

    def remove(self) -> None:
        """Restore the module. If somebody wrapped our wrapper since, theirs stays and ours passes straight through."""
        self._active = False
        if vars(self._module).get(self._name) is not self._call:
            return
        if self._had_attribute:
            setattr(self._module, self._name, self._original)
        else:
            delattr(self._module, self._name)


def override_owner(module: nn.Module, name: str) -> Any:
    """The owner of the override in force on `module.name`; None if there is none."""
    return getattr(vars(module).get(name), _MARK, None)


def overridden(modules: Iterable[nn.Module], name: str) -> bool:
    """Whether an override with an owner is in force on `name` of any of these modules."""
    return any(override_owner(module, name) is not None for module in modules)


class BeamOverride:
    """Be told when beam search reorders a K/V cache, until `remove()`.

    `generate()` asks the model for a method `_reorder_cache` before it reorders the cache by itself; few have one.

    Args:
        model: the instance.
        listener: called with the cache and `beam_idx` (which row continues in each row) before it is reordered.
    """

    def __init__(self, model: nn.Module, listener: Callable[[Any, Any], object]) -> None:
        self._model = model
        self._original = getattr(model, _REORDER, None)
        self._had_attribute = _REORDER in vars(model)

        def reorder(cache: Any, beam_idx: Any) -> Any:
            listener(cache, beam_idx)
            if self._original is not None:
                return self._original(cache, beam_idx)
            cache.reorder_cache(beam_idx)
            return cache

        setattr(model, _REORDER, reorder)

    def remove(self) -> None:
        """Restore the model."""
        if self._had_attribute:
            setattr(self._model, _REORDER, self._original)
        else:
            delattr(self._model, _REORDER)
