"""Which layers a setting skips, by zero-based index."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from fractions import Fraction

from stageprune.errors import SettingError
from stageprune.methods import PrefillOnlyPruning


def skipped_layers(method: PrefillOnlyPruning, num_hidden_layers: int) -> tuple[int, ...]:
    """The layers that `method` skips in a model of `num_hidden_layers` layers, ascending.

    The count is `floor(ratio * num_hidden_layers)`; `interleaved` skips the last layer of each of as many equal
    stretches, so that every third layer goes at ratio 1/3.

    Raises:
        SettingError: if an explicit index is not a layer of this model, or importance scores are of another number of
            layers.
    """
    if not isinstance(method.layers, str):
        outside = [index for index in method.layers if index >= num_hidden_layers]
        if outside:
            raise SettingError(
                f"layer {outside[0]} does not exist: the model has {num_hidden_layers} layers, 0 to "
                f"{num_hidden_layers - 1}"
            )
        return tuple(method.layers)
    # 1/3 of 36 must be 12 also when the product falls a rounding error short of it.
    count = math.floor(method.ratio * num_hidden_layers + 1e-9)
    if method.layers == "first":
        return tuple(range(count))
    if method.layers == "interleaved":
        return tuple((step + 1) * num_hidden_layers // count - 1 for step in range(count))
    if method.layers == "importance":
        assert isinstance(method.importance, tuple)
        if len(method.importance) != num_hidden_layers:
            raise SettingError(
                f"importance has scores of {len(method.importance)} layers, but the model has {num_hidden_layers}"
            )
        return least_important(method.importance, count, method.contiguous)
    return tuple(range(num_hidden_layers - count, num_hidden_layers))


def least_important(scores: Sequence[float], count: int, contiguous: bool) -> tuple[int, ...]:
    """The `count` layers that matter least, ascending; among equals the deepest.

    Args:
        scores: the importance of each layer; finite.
        count: at most as many as there are scores.
        contiguous: whether they must be neighbours: the run with the least total importance.
    """
    if not contiguous:
        return tuple(sorted(sorted(range(len(scores)), key=lambda layer: (scores[layer], -layer))[:count]))
    exact = [Fraction(score) for score in scores]  # sums of floats depend on their order: equal runs would differ
    starts = range(len(scores) - count, -1, -1)
    start = min(starts, key=lambda start: sum(exact[start : start + count], Fraction()))
    return tuple(range(start, start + count))


def runs_of(indices: Sequence[int], ends: Collection[int] = ()) -> list[list[int]]:
    """Maximal stretches of consecutive indices (ascending ones); none goes on behind one of `ends`."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1 and index - 1 not in ends:
            runs[-1].append(index)
        else:
            runs.append([index])
    return runs
