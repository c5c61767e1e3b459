"""How many channels are retained, candidates, pruned and picked (arXiv 2602.06822, sections 3.3 and A.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from stageprune.errors import SettingError
from stageprune.methods import OnlineChannelPruning


@dataclass(frozen=True)
class Sizes:
    """Numbers of channels of one FFN.

    Attributes:
        total: `intermediate_size`, h.
        retained: |R|, always active.
        candidates: |C|, decided anew for each token.
        active: the budget, |R| + K.
        up: channels whose up projection a token computes; what that is depends on the selection.
    """

    total: int
    retained: int
    candidates: int
    active: int
    up: int

    @property
    def computed(self) -> int:
        """|R| + |C|: the channels that are not pruned."""
        return self.retained + self.candidates

    @property
    def pruned(self) -> int:
        """|P|: channels never computed for this prompt."""
        return self.total - self.computed

    @property
    def picked(self) -> int:
        """K: candidates that a token activates."""
        return self.active - self.retained

    @property
    def dense(self) -> bool:
        """Whether every channel is active."""
        return self.active == self.total


def sizes_of(total: int, mlp_ratio: float, method: OnlineChannelPruning) -> Sizes:
    """The sizes for an FFN of `total` channels: |R| = (1-r-d)h, |C| = 2dh, |P| = (r-d)h, and 1-r of h active.

    Where r - d < 0 nothing is pruned, where r + d > 1 nothing is retained; the number of active channels stays. Each
    number is rounded to nearest, then up to `method.multiple`.
    """
    if mlp_ratio == 0:
        return Sizes(total, total, 0, total, total)
    delta = method.delta if method.pruned_share is None else mlp_ratio - method.pruned_share
    pruned = min(max(_round((mlp_ratio - delta) * total), 0), total)
    computed = max(_up(total - pruned, method.multiple, total), 1)
    active = min(_up(max(_round((1 - mlp_ratio) * total), 1), method.multiple, total), computed)
    retained = min(_up(max(_round((1 - mlp_ratio - delta) * total), 0), method.multiple, total), active)
    return Sizes(total, retained, computed - retained, active, _ups(total, computed, active, method))


def _ups(total: int, computed: int, active: int, method: OnlineChannelPruning) -> int:
    if method.selection == "cascade":
        wanted = (computed + active) / 2 if method.up_share is None else method.up_share * total
        return max(active, _up(min(_round(wanted), computed), method.multiple, computed))
    return {"partition": computed, "fixed": active, "full": total, "gate": active}[method.selection]


def mlp_ratio_of(ratio: float, attention: int, ffn: int) -> float:
    """The MLP ratio that removes `ratio` of attention and FFN parameters from the FFN alone (Table 8, section 1.8).

    Args:
        ratio: the overall target.
        attention: parameters of a layer's attention projections.
        ffn: parameters of a layer's FFN (of the active routed experts).

    Raises:
        SettingError: if the FFN is too small to give that much.
    """
    result = ratio * (attention + ffn) / ffn
    if result >= 1:
        raise SettingError(
            f"ratio={ratio} cannot come from the FFN alone: it holds {ffn / (attention + ffn):.0%} of the layer; "
            "choose less, or set mlp_ratio"
        )
    return result


def requested_ratio(method: OnlineChannelPruning, index: int) -> float:
    """What the setting says of a layer: the MLP ratio, or else the overall one."""
    if method.ratios is not None:
        return method.ratios[index]
    return method.ratio if method.mlp_ratio is None else method.mlp_ratio


def layer_ratio(method: OnlineChannelPruning, index: int, attention: int, ffn: int) -> float:
    """The MLP ratio of a layer; the arguments are those of `mlp_ratio_of`."""
    requested = requested_ratio(method, index)
    given = method.ratios is not None or method.mlp_ratio is not None
    return requested if given else mlp_ratio_of(requested, attention, ffn)


def check_layers(method: OnlineChannelPruning, count: int, what: str) -> None:
    """Compare the layers that the setting names with the `count` that there are.

    Raises:
        SettingError: if they do not fit; `what` is what has the layers, such as `"model"`.
    """
    if method.ratios is not None and len(method.ratios) != count:
        raise SettingError(f"ratios lists {len(method.ratios)} layers, but the {what} has {count}")
    check_protected(method.protect, count, what)


def check_protected(protect: Sequence[int], count: int, what: str) -> None:
    """Likewise for the layers that stay dense alone.

    Raises:
        SettingError: if one of them is not there.
    """
    outside = [index for index in protect if index >= count]
    if outside:
        raise SettingError(f"protect names layer {outside[0]}, but the {what} has {count} layers, 0 to {count - 1}")


def _round(value: float) -> int:
    """To nearest, halves up; a floating-point error short of a half counts as a half."""
    return math.floor(value + 0.5 + 1e-9)


def _up(value: int, multiple: int, most: int) -> int:
    return min(-(-value // multiple) * multiple, most)
