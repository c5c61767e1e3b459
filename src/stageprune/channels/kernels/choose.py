"""Choose the backend of a layer."""

from __future__ import annotations

from stageprune.channels.kernels.base import Backend, Layer
from stageprune.channels.kernels.indexed import IndexedBackend, why_not_indexed
from stageprune.channels.kernels.masked import MaskedBackend
from stageprune.channels.kernels.sliced import SlicedBackend
from stageprune.errors import SettingError, UnsupportedModelError
from stageprune.methods import OnlineChannelPruning


def make_backend(method: OnlineChannelPruning, layer: Layer) -> Backend:
    """The backend that the setting names, or for `"auto"` the fastest that can run this layer.

    Raises:
        SettingError: if a backend is forced that cannot do the selection, or a selection needs a gate.
        UnsupportedModelError: if a backend is forced that cannot run on this machine or with these weights.
    """
    if layer.selection in ("gate", "cascade") and layer.ffn.gate is None:
        raise SettingError(
            f"selection={layer.selection!r} needs FFNs with a gate projection, which this model does not have"
        )
    name = method.backend
    sliceable = layer.selection in ("partition", "fixed")
    if name == "masked":
        return MaskedBackend(layer)
    obstacle = why_not_indexed(layer)
    if name == "indexed" and obstacle:
        raise UnsupportedModelError(f"backend='indexed' cannot be used: {obstacle}")
    if name == "sliced" and not sliceable:
        raise SettingError(f"backend='sliced' cannot do selection={layer.selection!r}, whose channels change with each "
                           "token; use 'indexed', 'masked' or 'auto'")  # fmt: skip
    if name == "sliced" and not layer.ffn.plain:
        raise UnsupportedModelError("backend='sliced' needs plain weights (not quantized, adapted or offloaded)")
    if name == "indexed" or (name == "auto" and not obstacle):
        return IndexedBackend(layer)
    return SlicedBackend(layer) if sliceable and layer.ffn.plain else MaskedBackend(layer)
