"""The settings of online channel pruning: what is accepted, what is refused, what does not fit a model, and JSON."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stageprune as sp
from stageprune.channels.costs import dense_cost, pruned_cost
from stageprune.channels.sizes import sizes_of
from stageprune.methods.online_channels import PRESETS
from zoo import BY_NAME

SHARES = st.floats(0, 1, exclude_max=True)
SETTINGS = st.fixed_dictionaries(
    {},
    optional=dict(
        ratio=SHARES,
        mlp_ratio=st.none() | SHARES,
        partition_fraction=st.floats(0, 1),
        pruned_share=st.none() | SHARES,
        selection=st.sampled_from(["partition", "fixed", "full", "gate", "cascade"]),
        prefill=st.sampled_from(["candidates", "budget", "dense"]),
        scope=st.sampled_from(["batch", "sequence"]),
        backend=st.sampled_from(["auto", "masked", "sliced", "indexed"]),
        ratios=st.none() | st.lists(SHARES, max_size=8) | st.lists(SHARES, max_size=8).map(tuple),
        protect=st.sets(st.integers(0, 99)).map(list),
        refresh=st.none() | st.integers(1, 10_000),
        multiple=st.integers(1, 10_000),
    ),
)


@given(SETTINGS)
def test_settings_round_trip_through_json(settings) -> None:
    method = sp.OnlineChannelPruning(**settings)
    assert sp.OnlineChannelPruning.from_json(method.to_json()) == method
    assert sp.OnlineChannelPruning.from_dict(method.to_dict()) == method
    assert sp.OnlineChannelPruning.from_dict(json.loads(json.dumps(method.to_dict()))) == method
    assert hash(sp.OnlineChannelPruning.from_json(method.to_json())) == hash(method)
    expected = dict(settings)
    if "protect" in settings:
        expected["protect"] = tuple(sorted(settings["protect"]))
    if settings.get("ratios") is not None:
        expected["ratios"] = tuple(settings["ratios"])
    assert {name: getattr(method, name) for name in settings} == expected


def test_the_defaults_are_the_papers() -> None:
    method = sp.OnlineChannelPruning()
    assert method == sp.OnlineChannelPruning.preset("paper") == sp.OnlineChannelPruning(0.2)
    assert method.delta == 0.05
    assert (method.selection, method.prefill, method.scope) == ("partition", "candidates", "batch")
    assert method.to_dict()["method"] == "online-channel-pruning"


def test_presets() -> None:
    """Each reads what its documentation says, and computes every gate."""
    bytes_read = {}
    for name in PRESETS:
        method = sp.OnlineChannelPruning.preset(name)
        assert sp.OnlineChannelPruning.from_json(method.to_json()) == method
        if name != "paper":
            assert method.mlp_ratio is not None
            sizes = sizes_of(10_000, method.mlp_ratio, method)
            assert sizes.pruned == 0
            bytes_read[name] = pruned_cost(1, sizes, method.selection).weights / dense_cost(1, 10_000).weights
    assert bytes_read == pytest.approx({"careful": 0.80, "balanced": 0.73, "fast": 0.65}, abs=0.005)
    with pytest.raises(sp.SettingError, match="balanced"):
        sp.OnlineChannelPruning.preset("quick")


def test_settings_are_frozen_and_hashable() -> None:
    method = sp.OnlineChannelPruning(ratios=[0.1, 0.2], protect=[2, 1])
    assert hash(method) == hash(sp.OnlineChannelPruning(ratios=(0.1, 0.2), protect=(1, 2)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.ratio = 0.5


def test_numpy_numbers_are_numbers() -> None:
    method = sp.OnlineChannelPruning(np.float64(0.25), mlp_ratio=np.float64(0.5), partition_fraction=np.float64(0.5))
    assert (method.ratio, method.mlp_ratio, method.delta) == (0.25, 0.5, 0.25)
    assert type(method.ratio) is type(method.partition_fraction) is float


def test_integers_are_shares() -> None:
    method = sp.OnlineChannelPruning(0, mlp_ratio=0, partition_fraction=1, ratios=[0, 0.5])
    assert sp.OnlineChannelPruning.from_json(method.to_json()) == method
    assert type(method.partition_fraction) is float


NO_SHARES = (-0.1, -1e-9, 1, 1.0, 30, math.nan, math.inf, -math.inf, "0.3", True, [0.3], {}, 0.3j, b"0.3")
NO_COUNTS = (0, -1, 1.0, 1.5, True, "4", [4], math.nan, math.inf)
WRONG = [
    *[dict(ratio=value) for value in (*NO_SHARES, None)],
    *[dict(mlp_ratio=value) for value in NO_SHARES],
    *[dict(pruned_share=value) for value in NO_SHARES],
    *[dict(partition_fraction=value) for value in (-0.1, 1.01, 10, math.nan, math.inf, "0.1", None, False, [0.1], 1j)],
    *[dict(selection=value) for value in ("variant1", "", "Partition", None, 1, ["partition"], b"full")],
    *[dict(up_share=value, selection="cascade") for value in (-0.1, 1.01, math.nan, "0.5", True, [0.5])],
    *[dict(up_share=0.5, selection=value) for value in ("partition", "gate")],
    *[dict(prefill=value) for value in ("retained", "", "DENSE", None, 0, True)],
    *[dict(scope=value) for value in ("token", "", "Batch", None, 1, ("batch",))],
    *[dict(backend=value) for value in ("cuda", "", "Masked", None, 0, torch.float32)],
    *[dict(multiple=value) for value in (*NO_COUNTS, None)],
    *[dict(refresh=value) for value in NO_COUNTS],
    *[dict(ratios=value) for value in (0.3, "0.3", {0.1, 0.2}, {0: 0.3}, range, True)],
    *[dict(ratios=value) for value in ([1.0], [0.3, -0.1], [0.3, "0.3"], [None], [True], [[0.3]], [math.nan], b"\x00")],
    *[dict(protect=value) for value in (0, "0", "last", {1, 2}, {0: 1}, range, None, 1.5, True)],
    *[dict(protect=value) for value in ([-1], [0, -3], [1, 1], [1.0], ["1"], [None], [True], [[1]], b"\x01")],
]


@pytest.mark.parametrize("settings", WRONG, ids=str)
def test_wrong_settings_are_one_clear_error(settings) -> None:
    name = next(iter(settings))
    with pytest.raises(sp.SettingError) as caught:
        sp.OnlineChannelPruning(**settings)
    message = str(caught.value)
    assert name in message, "the message names the setting"
    assert "\n" not in message
    assert len(message) < 300


@pytest.mark.parametrize(
    "data",
    [
        None,
        3,
        "paper",
        [],
        ["ratio"],
        {"ratioes": [0.3]},
        {"gamma": 0.1},
        {1: 2},
        {"method": "prefill-only-pruning"},
        {"method": None},
        {"ratio": "a"},
        {"multiple": None},
        {"protect": "01"},
    ],
    ids=str,
)
def test_wrong_dictionaries(data) -> None:
    with pytest.raises(sp.SettingError):
        sp.OnlineChannelPruning.from_dict(data)


@pytest.mark.parametrize(
    "text",
    [
        *["", "{", "[]", "3", "null", '{"ratio": NaN}', '{"partition_fraction": NaN}', '{"mlp_ratio": 0.3,}', "\x00"],
        *['{"ratios": [0.5, null]}', '{"ratios": "0.5"}', '{"protect": [0.5]}', '{"scope": null}', None],
        '{"multiple": Infinity}',
    ],
)
def test_damaged_json(text) -> None:
    with pytest.raises(sp.SettingError):
        sp.OnlineChannelPruning.from_json(text)


@pytest.mark.parametrize("name", ["", "Paper", "fast!", None, 3])
def test_unknown_presets(name) -> None:
    with pytest.raises(sp.SettingError, match="paper"):
        sp.OnlineChannelPruning.preset(name)


def test_sequences_of_any_kind() -> None:
    method = sp.OnlineChannelPruning(ratios=deque([0.1, 0.2]), protect=range(3))
    assert (method.ratios, method.protect) == ((0.1, 0.2), (0, 1, 2))


# -- settings and models -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "settings", "message"),
    [
        ("llama", dict(ratios=[0.3] * 5), "ratios lists 5 layers.* 6"),
        ("llama", dict(ratios=[]), "ratios lists 0 layers.* 6"),
        ("llama", dict(protect=[6]), "layer 6"),
        ("llama", dict(ratio=0.7), "mlp_ratio"),  # the FFN holds 60 % of a layer
        ("gpt-neox", dict(mlp_ratio=0.3, selection="gate"), "gate"),
        ("nemotron", dict(mlp_ratio=0.3, selection="gate"), "gate"),
        ("llama", dict(mlp_ratio=0.3, selection="full", backend="sliced"), "sliced"),
        ("llama", dict(mlp_ratio=0.3, selection="gate", backend="sliced"), "sliced"),
    ],
    ids=str,
)
def test_a_setting_that_does_not_fit_leaves_the_model_alone(architecture: str, settings, message: str) -> None:
    model = BY_NAME[architecture].build(torch.float32)
    with pytest.raises(sp.SettingError, match=message) as caught:
        sp.prune(model, sp.OnlineChannelPruning(**settings))
    assert "\n" not in str(caught.value)
    assert not any({"forward", "generate"} & set(vars(module)) for module in model.modules())
    assert sp.handle_of(model) is None


def test_each_method_once() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    with pytest.raises(sp.SettingError, match="once"):
        sp.prune(model, sp.OnlineChannelPruning(), sp.OnlineChannelPruning(0.3))
    assert sp.handle_of(model) is None
