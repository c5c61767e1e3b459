"""Settings: what is accepted, what is refused, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageprune as sp


@given(
    ratio=st.floats(0, 1, exclude_max=True),
    layers=st.one_of(
        st.sampled_from(["last", "first", "interleaved"]), st.sets(st.integers(0, 99)).map(lambda found: list(found))
    ),
    kv_projection=st.booleans(),
    boundary=st.booleans(),
)
def test_settings_round_trip_through_json(ratio, layers, kv_projection, boundary) -> None:
    method = sp.PrefillOnlyPruning(ratio, layers, kv_projection, boundary)
    assert sp.PrefillOnlyPruning.from_json(method.to_json()) == method
    assert sp.PrefillOnlyPruning.from_dict(method.to_dict()) == method


def test_settings_are_frozen_and_hashable() -> None:
    method = sp.PrefillOnlyPruning(layers=[2, 1])
    assert hash(method) == hash(sp.PrefillOnlyPruning(layers=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.ratio = 0.5


WRONG = [
    *[dict(ratio=ratio) for ratio in (-0.1, 1, 1.0, 33, math.nan, math.inf, -math.inf)],
    *[dict(ratio=ratio) for ratio in ("1/3", None, True, [0.3], {}, 0.3j, b"0.3")],
    *[dict(layers=layers) for layers in ("deep", "", "LAST", "0,1", 3, 2.5, None, {1, 2}, {"a": 1}, range)],
    *[dict(layers=layers) for layers in ([-1], [0, -3], [1, 1], [1.0], ["1"], [None], [True], [[1]], [0.5, 1])],
    *[dict(kv_projection=value) for value in (1, 0, None, "yes", [])],
    *[dict(boundary=value) for value in (1, 0, None, "no", 0.0)],
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_wrong_settings_are_one_clear_error(settings) -> None:
    name, value = next(iter(settings.items()))
    with pytest.raises(sp.SettingError) as caught:
        sp.PrefillOnlyPruning(**settings)
    message = str(caught.value)
    assert name.rstrip("s").split("_")[0] in message, "the message names the setting"
    assert "\n" not in message
    assert len(message) < 300
    del value


@pytest.mark.parametrize(
    "data",
    [None, 3, "last", [], ["ratio"], {"ratios": 0.3}, {1: 2}, {"method": "other"}, {"method": None}, {"ratio": "a"}],
    ids=str,
)
def test_wrong_dictionaries(data) -> None:
    with pytest.raises(sp.SettingError):
        sp.PrefillOnlyPruning.from_dict(data)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "3", "null", '{"ratio": NaN}', '{"ratio": 0.3,}', '{"layers": [0.5]}', "\x00", None, 3]
)
def test_damaged_json(text) -> None:
    with pytest.raises(sp.SettingError):
        sp.PrefillOnlyPruning.from_json(text)


def test_numpy_numbers_are_numbers() -> None:
    assert sp.PrefillOnlyPruning(np.float64(0.25)).ratio == 0.25
