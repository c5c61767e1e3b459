"""Methods' settings in a few words, as rows of tables are named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageprune.evaluate.report import show


def words(methods: Sequence[Any]) -> str:
    """Of both methods, as `to_dict` writes them."""
    return " + ".join(map(_method, methods)) or "dense"


def _method(data: Any) -> str:
    kind = str(data["method"])
    if kind == "prefill-only-pruning":
        return _layers(data)
    if kind == "online-channel-pruning":
        return _channels(data)
    return kind


def _layers(data: Any) -> str:
    chosen = data["layers"]
    rule = f"layers {show.layers(chosen)}" if isinstance(chosen, list) else f"{data['ratio']:.3g} of layers, {chosen}"
    return f"{rule}, fitted K/V" if data.get("projections") else rule


def _channels(data: Any) -> str:
    share = data.get("mlp_ratio")
    size = f"channels {data['ratio']:.3g}" if share is None else f"channels r {share:.3g}"
    parts = [size, str(data["selection"])]
    if data["selection"] == "partition":
        parts.append(f"γ {data['partition_fraction']:g}")
    if data.get("refresh"):
        parts.append(f"refresh {data['refresh']}")
    return ", ".join(parts)
