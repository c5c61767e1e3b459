"""Parts of the time, and whole answers: sums by hand, and that timing leaves no trace."""

from __future__ import annotations

import pytest
import torch

import stageprune as sp
from helpers import surface, tokens
from stageprune.evaluate.clock import TimedAnswer
from stageprune.evaluate.profile import Split, module_clock, profile, split
from stageprune.evaluate.speed import answer_speed
from zoo import BY_NAME


@pytest.fixture
def model():
    return BY_NAME["llama"].build(torch.float32, "sdpa")


def test_a_split_by_hand() -> None:
    calls = [("attention", 1.0, 2.0), ("ffn", 2.0, 5.0), ("attention", 11.0, 12.0), ("ffn", 12.0, 14.0)]
    assert split(calls, 0.0, 10.0) == Split(1.0, 3.0, 6.0)
    assert split(calls, 10.0, 20.0, tokens=2) == Split(0.5, 1.0, 3.5)
    part = Split(1.0, 3.0, 4.0)
    assert part.to_dict()["shares"] == {"attention": 0.125, "ffn": 0.375, "other": 0.5}


@pytest.mark.parametrize("method", [sp.PrefillOnlyPruning(0.5), sp.OnlineChannelPruning(mlp_ratio=0.5)])
def test_every_module_is_timed_and_the_parts_add_up(model, method) -> None:
    before, layers = surface(model), len(model.model.layers)
    with sp.prune(model, method) as handle:
        pruned = surface(model)
        with module_clock(model) as calls:
            model.generate(tokens(1, 9), max_new_tokens=3, min_new_tokens=3, do_sample=False)
        for part in ("attention", "ffn"):
            assert sum(name == part for name, _, _ in calls) == 3 * layers
        assert all(start <= end for _, start, end in calls)
        assert surface(model) == pruned
        result = profile(handle, tokens(1, 9), 3, (1e9, 1e9))
        single = profile(handle, tokens(1, 9), 1, (1.0, 1.0), runs=1)
    for splits in (result.dense, result.pruned):
        assert splits.overhead == pytest.approx(-1)
        assert splits.later_token is not None
        for part in (splits.first_token, splits.later_token):
            assert min(part.attention, part.ffn, part.other) > 0
            assert sum(part.to_dict()["shares"].values()) == pytest.approx(1)
    assert single.dense.later_token is None
    assert single.to_dict()["pruned"]["later_token"] is None
    assert surface(model) == before


def test_a_whole_answer_by_hand(model) -> None:
    def turn(*seconds: float) -> TimedAnswer:
        return TimedAnswer(torch.zeros(2, len(seconds), dtype=torch.long), seconds)

    pairs = [(turn(4.0, 8.0), turn(2.0, 4.0)), (turn(4.0, 8.0), turn(1.0, 2.0)), (turn(4.0, 8.0), turn(4.0, 8.0))]
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:
        speed = answer_speed(handle, 20, pairs)
        ideal = handle.report(20).ideal_speedup
    assert speed.new_tokens == 2
    assert speed.speedup.median == 2
    assert speed.tokens_per_s == (2 * 2 / 8, 2 * 2 / 4)
    assert speed.ideal_speedup == pytest.approx(1 / (0.5 / ideal + 0.5)), "half of the dense time is the prompt's"
    assert speed.to_dict()["achieved"] == speed.achieved
