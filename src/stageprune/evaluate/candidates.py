"""Which sets of layers a plan measures.

When any layer is skipped in prefill, the last one is treated like a skipped layer, too (see `prefill/skip.py`): the
result and the work are the same. So every candidate here has it, and none is measured twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from stageprune.errors import SettingError
from stageprune.prefill.layers import least_important

MOST_SUBSETS = 4096
"""Of the layers, that are measured one by one: those of 13 layers."""

FEW_LAYERS = 7
"""Up to so many layers, all their subsets are no more work than the rules take on an ordinary model."""


def rule_candidates(
    num_hidden_layers: int, scores: Sequence[float] | None = None
) -> dict[tuple[int, ...], tuple[str, ...]]:
    """What the rules skip, for every number of layers, with the names of the rules.

    Args:
        num_hidden_layers: of the model.
        scores: the prefill importance of each layer; None leaves the two rules by importance out.

    Raises:
        SettingError: if there is another number of scores.
    """
    if scores is not None and len(scores) != num_hidden_layers:
        raise SettingError(f"importance has scores of {len(scores)} layers, but the model has {num_hidden_layers}")
    found: dict[tuple[int, ...], tuple[str, ...]] = {}
    for count in range(1, num_hidden_layers + 1):
        rules = {"last": tuple(range(num_hidden_layers - count, num_hidden_layers))}
        if scores is not None:
            rules["contiguous"] = least_important(scores, count, contiguous=True)
            rules["free"] = least_important(scores, count, contiguous=False)
        for rule, layers in rules.items():
            layers = tuple(sorted({*layers, num_hidden_layers - 1}))
            if rule not in found.get(layers, ()):
                found[layers] = (*found.get(layers, ()), rule)
    return found


def subset_candidates(
    num_hidden_layers: int, scores: Sequence[float] | None = None
) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Every set of layers that can be skipped; arguments and result are those of `rule_candidates`.

    Raises:
        SettingError: if they are too many to be measured, or there is another number of scores.
    """
    if 2 ** (num_hidden_layers - 1) > MOST_SUBSETS:
        raise SettingError(
            f"{num_hidden_layers} layers have more subsets than the {MOST_SUBSETS} that can be measured; search among "
            "the rules instead"
        )
    last, rules = num_hidden_layers - 1, rule_candidates(num_hidden_layers, scores)
    sets = ((*others, last) for count in range(last + 1) for others in combinations(range(last), count))
    return {layers: rules.get(layers, ()) for layers in sets}
