"""Settings: what is accepted, what is refused, and that they survive JSON."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import stageprune as sp
from stageprune.prefill.importance import Drift, SampleScore


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


@given(scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1), contiguous=st.booleans())
def test_importance_round_trips_through_json(scores, contiguous) -> None:
    method = sp.PrefillOnlyPruning(0.25, "importance", importance=scores, contiguous=contiguous)
    again = sp.PrefillOnlyPruning.from_json(method.to_json())
    assert again == method
    assert hash(again) == hash(method)
    assert again.importance == tuple(scores)


def test_importance_from_an_analysis_and_from_its_file(tmp_path) -> None:
    drift = Drift((), (), (), ())
    samples = (
        SampleScore(0, 5, 2, 1.0, (3.0, 0.0), (1.0, 1.0), drift),
        SampleScore(1, 5, 2, 1.0, (-1.0, 0.0), (1.0, 1.0), drift),
    )
    importance = sp.Importance({}, {}, samples)
    importance.save(tmp_path / "i.json")
    for given_as in (importance, tmp_path / "i.json", str(tmp_path / "i.json"), [5, 0]):
        method = sp.PrefillOnlyPruning(layers="importance", importance=given_as)
        assert method.importance == (5.0, 0.0)
        assert method == sp.PrefillOnlyPruning(layers="importance", importance=(5.0, 0.0))
    with pytest.raises(sp.ResultFileError, match=r"j\.json"):
        sp.PrefillOnlyPruning(layers="importance", importance=str(tmp_path / "j.json"))


def test_settings_are_frozen_and_hashable() -> None:
    method = sp.PrefillOnlyPruning(layers=[2, 1])
    assert hash(method) == hash(sp.PrefillOnlyPruning(layers=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.ratio = 0.5


WRONG = [
    *[dict(ratio=ratio) for ratio in (-0.1, 1, 1.0, 33, math.nan, math.inf, -math.inf)],
    dict(ratio=10**400),
    *[dict(ratio=ratio) for ratio in ("1/3", None, True, [0.3], {}, 0.3j, b"0.3")],
    *[dict(layers=layers) for layers in ("deep", "", "LAST", "0,1", 3, 2.5, None, {1, 2}, {"a": 1}, range)],
    *[dict(layers=layers) for layers in ([-1], [0, -3], [1, 1], [1.0], ["1"], [None], [True], [[1]], [0.5, 1])],
    *[dict(importance=value, layers="importance") for value in (3, 2.5, True, b"1", {1.0}, [], ["1"], [None], [True])],
    *[dict(importance=value, layers="importance") for value in ([math.nan], [1.0, math.inf], [[1.0]])],
    dict(importance=[1.0]),
    dict(importance=[1.0], layers=[0]),
    dict(importance=None, layers="importance"),
    *[dict(contiguous=value) for value in (False, 1, None, "no")],
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
