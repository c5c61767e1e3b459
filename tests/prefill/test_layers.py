"""From a ratio to layers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageprune as sp
from reference.layer_choice import least_important
from stageprune.prefill.layers import skipped_layers


@pytest.mark.parametrize(
    ("total", "ratio", "skipped"),
    [
        (32, 1 / 3, range(22, 32)),  # Llama-3.1-8B: 10 of 32, Table 1
        (36, 1 / 3, range(24, 36)),  # Qwen3-VL-8B: 12 of 36
        (48, 1 / 3, range(32, 48)),  # Gemma-3-12B: 16 of 48
        (36, 0.20, range(29, 36)),
        (36, 0.25, range(27, 36)),
        (36, 0.5, range(18, 36)),
        (30, 0.3, range(21, 30)),  # 0.3 * 30 falls short of 9 in floating point
        (30, 0.0, range(0)),
        (30, 0.01, range(0)),
        (2, 0.99, range(1, 2)),
    ],
)
def test_the_last_layers(total: int, ratio: float, skipped: range) -> None:
    assert skipped_layers(sp.PrefillOnlyPruning(ratio), total) == tuple(skipped)


def test_other_rules() -> None:
    assert skipped_layers(sp.PrefillOnlyPruning(1 / 3, "first"), 12) == (0, 1, 2, 3)
    assert skipped_layers(sp.PrefillOnlyPruning(1 / 3, "interleaved"), 12) == (2, 5, 8, 11)
    assert skipped_layers(sp.PrefillOnlyPruning(0.5, "interleaved"), 7) == (1, 3, 6)
    assert skipped_layers(sp.PrefillOnlyPruning(layers=[5, 2]), 12) == (2, 5)
    assert skipped_layers(sp.PrefillOnlyPruning(layers=[]), 12) == ()


@pytest.mark.parametrize("count", range(12))
def test_every_rule_skips_the_same_number(count: int) -> None:
    for rule in ("last", "first", "interleaved"):
        layers = skipped_layers(sp.PrefillOnlyPruning(count / 12, rule), 12)
        assert len(layers) == len(set(layers)) == count


def test_a_layer_beyond_the_model_is_an_error() -> None:
    with pytest.raises(sp.SettingError, match=r"layer 12 does not exist.* 0 to 11"):
        skipped_layers(sp.PrefillOnlyPruning(layers=[3, 12]), 12)


def by_importance(scores: list[float], ratio: float, contiguous: bool) -> tuple[int, ...]:
    method = sp.PrefillOnlyPruning(ratio, "importance", importance=scores, contiguous=contiguous)
    return skipped_layers(method, len(scores))


@given(
    scores=st.one_of(
        st.lists(st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.7]), min_size=1, max_size=9),  # many ties, sums that round
        st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9),
    ),
    count=st.integers(0, 8),
    contiguous=st.booleans(),
)
def test_the_least_important_layers_of_all_choices(scores, count, contiguous) -> None:
    count = min(count, len(scores) - 1)
    assert by_importance(scores, count / len(scores), contiguous) == least_important(scores, count, contiguous)


def test_importance_by_hand() -> None:
    scores = [9.0, 1.0, 1.0, 5.0, 0.5, 4.0, 0.0]
    assert by_importance(scores, 2 / 7, True) == (1, 2), "2.0 together"
    assert by_importance(scores, 2 / 7, False) == (4, 6)
    assert by_importance(scores, 3 / 7, True) == (4, 5, 6)
    assert by_importance(scores, 3 / 7, False) == (2, 4, 6), "of two equal ones the deeper"
    assert by_importance([1.0] * 6, 1 / 2, True) == by_importance([1.0] * 6, 1 / 2, False) == (3, 4, 5)
    assert by_importance([0.1, 0.2, 0.3, 0.3, 0.2, 0.1], 1 / 2, True) == (3, 4, 5), "equal whatever the order of adding"
    assert by_importance(scores, 0, True) == ()


def test_scores_of_another_number_of_layers() -> None:
    method = sp.PrefillOnlyPruning(layers="importance", importance=[1.0, 0.0])
    with pytest.raises(sp.SettingError, match="scores of 2 layers, but the model has 12"):
        skipped_layers(method, 12)
