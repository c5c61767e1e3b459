"""Plans: the optimum against brute force, the frontier, going on, and the file."""

from __future__ import annotations

import dataclasses
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stageprune as sp
from helpers import InFloat64, surface, tokens
from reference.layer_choice import best_set, every_set, greedy, quality
from stageprune.evaluate.candidates import rule_candidates, subset_candidates
from stageprune.evaluate.fingerprint import identity
from stageprune.evaluate.plan import Bound, Plan, Point
from stageprune.evaluate.planning import Progress, measure
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import find_decoder
from stageprune.records import read_record, write_record
from zoo import BY_NAME

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (11, 7)]
ANSWER, LENGTH = 3, 16


@pytest.fixture(scope="module")
def model() -> Any:
    return BY_NAME["llama"].build()


@pytest.fixture(scope="module")
def brute_force(model: Any) -> dict[tuple[int, ...], tuple[float, float]]:
    """Every set of the six layers, measured the slow way."""
    with InFloat64():
        return quality(model, [greedy(model, prompt, ANSWER) for prompt in PROMPTS], ANSWER, every_set(6))


def measured(model: Any, candidates: Any, **options: Any) -> tuple[Point, ...]:
    with InFloat64():
        return measure(model, PROMPTS, candidates, answer_tokens=ANSWER, speed_tokens=LENGTH, **options)


def planned(model: Any, points: tuple[Point, ...], bound: Bound) -> Plan:
    return Plan(identity(model), {}, bound, prompt_flops(find_decoder(model), LENGTH), points)


@pytest.fixture(scope="module")
def points(model: Any) -> tuple[Point, ...]:
    return measured(model, subset_candidates(6))


def test_every_point_is_what_brute_force_measures(points, brute_force) -> None:
    assert {point.layers for point in points} == {layers for layers in brute_force if 5 in layers}
    for point in points:
        for layers in (point.layers, point.layers[:-1]):
            if layers:  # skipping the last layer on top changes nothing
                kl, agreement = brute_force[layers]
                assert point.kl == pytest.approx(kl, rel=1e-6, abs=1e-9)
                assert point.agreement == agreement


def test_the_optimum_is_brute_forces_at_every_bound(model, points, brute_force) -> None:
    seen = set()
    for kl in sorted(kl for kl, _ in brute_force.values()):
        limit = kl * 1.001 + 1e-9  # not on a measurement, which is exact to rounding only
        best = planned(model, points, Bound(max_kl=limit)).best.layers
        expected = best_set(model, brute_force, lambda kl, _, limit=limit: kl <= limit)
        assert set(best) == ({*expected, 5} if expected else set()), limit
        seen.add(best)
    assert len(seen) > 5, "one choice for all bounds would prove little"
    for agreement in sorted({agreement for _, agreement in brute_force.values()}):
        best = planned(model, points, Bound(min_agreement=agreement)).best.layers
        expected = best_set(model, brute_force, lambda _, same, least=agreement: same >= least)
        assert set(best) == {*expected, 5}
    both = Bound(max_kl=0.3, min_agreement=0.5)
    expected = best_set(model, brute_force, lambda kl, same: kl <= 0.3 and same >= 0.5)
    assert set(planned(model, points, both).best.layers) == ({*expected, 5} if expected else set())


def test_the_saved_setting_does_what_was_measured(model, points) -> None:
    plan = planned(model, points, Bound(max_kl=sorted(point.kl for point in points)[9]))
    with sp.prune(model, plan.method) as handle:
        report = handle.report(LENGTH)
    assert report.pruned_flops == plan.best.flops
    assert report.ideal_speedup == plan.speedup(plan.best)


def test_layers_that_cost_differently_are_counted() -> None:
    """With sliding windows a layer of full attention is worth more than another."""
    model = BY_NAME["gemma3"].build()
    decoder = find_decoder(model)
    assert len(set(decoder.config.layer_types)) == 2
    sets = dict.fromkeys([(0, 5), (1, 5), (2, 5), tuple(range(6))], ())
    points = measure(model, PROMPTS[:1], sets, answer_tokens=1, speed_tokens=200)
    plan = Plan(identity(model), {}, Bound(min_agreement=0), prompt_flops(decoder, 200), points)
    assert plan.best.layers == tuple(range(6)), "everything is within this bound"
    assert len({point.flops for point in points[:3]}) > 1
    assert [point.flops for point in points] == [prompt_flops(decoder, 200, layers) for layers in sets]


def test_the_model_is_left_as_it_was(model) -> None:
    before = surface(model)
    measured(model, {(4, 5): ("last",)})
    assert surface(model) == before


def test_it_goes_on_where_it_was(model, points) -> None:
    candidates = dict(list(subset_candidates(6).items())[:3])
    steps: list[Progress] = []
    whole = measured(model, candidates, on_step=steps.append)
    assert [step.steps for step in steps] == [1, 2, 3, 4, 5]
    assert whole == points[:3]
    for step in steps:
        done = Progress.from_dict(json.loads(json.dumps(step.to_dict())))
        assert done == step
        further: list[Progress] = []
        assert measured(model, candidates, done=done, on_step=further.append) == whole, "bit for bit"
        assert len(further) == 5 - step.steps


def test_an_overflow_is_an_error() -> None:
    broken = BY_NAME["llama"].build(torch.float32)
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.inf)
    with pytest.raises(sp.NumericsError, match=r"without layers 4, 5 are not finite"):
        measure(broken, PROMPTS, {(4, 5): ()}, answer_tokens=2, speed_tokens=9)


def test_candidates_of_the_rules() -> None:
    assert list(rule_candidates(4)) == [(3,), (2, 3), (1, 2, 3), (0, 1, 2, 3)]
    assert set(rule_candidates(4).values()) == {("last",)}
    found = rule_candidates(5, [0.5, 0.1, 0.2, 3.0, 0.0])
    assert found == {
        (4,): ("last", "contiguous", "free"),
        (3, 4): ("last",),
        (1, 2, 4): ("contiguous", "free"),  # two neighbours, and the last layer that comes for nothing
        (1, 4): ("free",),
        (2, 3, 4): ("last",),
        (0, 1, 2, 4): ("contiguous", "free"),
        (1, 2, 3, 4): ("last", "contiguous"),
        (0, 1, 2, 3, 4): ("last", "contiguous", "free"),
    }
    with pytest.raises(sp.SettingError, match="scores of 5 layers, but the model has 4"):
        rule_candidates(4, [1.0] * 5)


def test_candidates_of_all_subsets() -> None:
    for layers in range(1, 9):
        expected = {(*part, layers - 1) for n in range(layers) for part in combinations(range(layers - 1), n)}
        assert set(subset_candidates(layers)) == expected
        assert len(subset_candidates(layers)) == 2 ** (layers - 1)
    assert len(subset_candidates(13)) == 4096
    scores = [0.5, 0.1, 0.2, 3.0, 0.0]
    assert {layers: rules for layers, rules in subset_candidates(5, scores).items() if rules} == rule_candidates(
        5, scores
    )
    with pytest.raises(sp.SettingError, match="14 layers have more subsets"):
        subset_candidates(14)


@st.composite
def some_points(draw: Any) -> tuple[Point, ...]:
    small = st.integers(0, 4)
    rows = draw(st.lists(st.tuples(st.integers(1, 8), small, small), max_size=12))
    return tuple(
        Point((index,), (), flops, kl / 4, None, agreement / 4, None)
        for index, (flops, kl, agreement) in enumerate(rows)
    )


@given(some_points(), st.integers(0, 4), st.integers(0, 4))
def test_frontier_and_optimum_of_any_points(points, kl, agreement) -> None:
    plan = Plan({"num_hidden_layers": 12}, {}, Bound(kl / 4, agreement / 4), 9, points)
    everything = [(9, 0.0, 1.0), *((point.flops, point.kl, point.agreement) for point in points)]
    best = min(
        (flops, kl, -same) for flops, kl, same in everything if kl <= plan.bound.max_kl and same >= agreement / 4
    )
    assert (plan.best.flops, plan.best.kl, -plan.best.agreement) == best
    undominated = {
        one
        for one in everything
        if not any(o != one and o[0] <= one[0] and o[1] <= one[1] and o[2] >= one[2] for o in everything)
    }
    shown = [(point.flops, point.kl, point.agreement) for point in plan.frontier]
    assert len(shown) == len(undominated)
    assert set(shown) == undominated
    assert [flops for flops, _, _ in shown] == sorted((flops for flops, _, _ in shown), reverse=True)
    assert (plan.best.flops, plan.best.kl, plan.best.agreement) in shown


@pytest.mark.parametrize(
    "bound",
    [{}, {"max_kl": -1}, {"max_kl": float("nan")}, {"max_kl": "1"}, {"min_agreement": 1.1}, {"min_agreement": True}],
    ids=str,
)
def test_wrong_bounds(bound) -> None:
    with pytest.raises(sp.SettingError, match=next(iter(bound), "needs a bound")):
        Bound(**bound)


@pytest.fixture
def plan(model, points) -> Plan:
    return dataclasses.replace(planned(model, points, Bound(max_kl=points[7].kl)), settings={"count": 2})


def test_the_file_holds_everything(plan: Plan, model: Any, tmp_path: Path) -> None:
    path = tmp_path / "stageprune.json"
    plan.save(path)
    again = Plan.load(path)
    assert again == plan
    assert again.method == plan.method
    again.save(tmp_path / "again.json")
    assert path.read_bytes() == (tmp_path / "again.json").read_bytes()
    assert sp.load_settings(path, model) == (plan.method,)
    assert json.loads(path.read_text())["plan"]["best"]["layers"] == list(plan.best.layers)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan["points"][0].pop("kl"),
        lambda plan: plan["points"][0].update(kl=None),
        lambda plan: plan["points"][0].update(layers="5"),
        lambda plan: plan["bound"].update(max_kl=-1),
        lambda plan: plan["bound"].clear(),
        lambda plan: plan.pop("dense_flops"),
        lambda plan: plan["points"].clear(),
    ],
    ids=["no-kl", "null", "layers", "negative", "no-bound", "no-flops", "other-optimum"],
)
def test_a_sealed_file_with_other_content_is_refused(change, plan: Plan, tmp_path: Path) -> None:
    path = tmp_path / "stageprune.json"
    plan.save(path)
    data = read_record(path, "stageprune-settings", 1)
    change(data["plan"])
    write_record(path, "stageprune-settings", 1, data)
    with pytest.raises(sp.ResultFileError, match=r"stageprune\.json.*no complete"):
        Plan.load(path)


def test_settings_without_a_plan(tmp_path: Path) -> None:
    sp.save_settings(tmp_path / "s.json", sp.PrefillOnlyPruning())
    with pytest.raises(sp.ResultFileError, match="no plan that led to them"):
        Plan.load(tmp_path / "s.json")
