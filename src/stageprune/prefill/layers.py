"""Which layers a setting skips, by zero-based index."""

from __future__ import annotations

import math

from stageprune.errors import SettingError
from stageprune.methods import PrefillOnlyPruning


def skipped_layers(method: PrefillOnlyPruning, num_hidden_layers: int) -> tuple[int, ...]:
    """The layers that `method` skips in a model of `num_hidden_layers` layers, ascending.

    The count is `floor(ratio * num_hidden_layers)`; `interleaved` skips the last layer of each of as many equal
    stretches, so that every third layer goes at ratio 1/3.

    Raises:
        SettingError: if an explicit index is not a layer of this model.
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
    return tuple(range(num_hidden_layers - count, num_hidden_layers))
