"""Confidence intervals, against a slow version and cases with a known answer."""

from __future__ import annotations

import math
import random

import pytest
import torch

from stageprune.evaluate.bootstrap import Bootstrap, ratio


def test_one_prompt_has_no_interval() -> None:
    estimate = ratio([6.0], [4], Bootstrap())
    assert (estimate.value, estimate.lower, estimate.upper) == (1.5, None, None)
    assert estimate.map(math.exp).value == math.exp(1.5)
    assert estimate.map(math.exp).upper is None


def test_equal_prompts_have_an_interval_without_width() -> None:
    estimate = ratio([3.0] * 5, [2] * 5, Bootstrap())
    assert (estimate.value, estimate.lower, estimate.upper) == (1.5, 1.5, 1.5)


def test_against_resampling_by_hand() -> None:
    sums, counts = [1.0, 5.0, 2.5, 0.0, 9.0], [2, 4, 1, 3, 5]
    bootstrap = Bootstrap(resamples=200, confidence=0.8, seed=3)
    draws = torch.randint(5, (200, 5), generator=torch.Generator().manual_seed(3)).tolist()
    results = sorted(sum(sums[i] for i in draw) / sum(counts[i] for i in draw) for draw in draws)

    def percentile(share: float) -> float:
        place = share * (len(results) - 1)
        low = math.floor(place)
        return results[low] + (place - low) * (results[min(low + 1, 199)] - results[low])

    estimate = ratio(sums, counts, bootstrap)
    assert estimate.value == pytest.approx(17.5 / 15)
    assert estimate.lower == pytest.approx(percentile(0.1))
    assert estimate.upper == pytest.approx(percentile(0.9))
    assert ratio(sums, counts, bootstrap) == estimate
    assert ratio(sums, counts, Bootstrap(200, 0.8, seed=4)) != estimate


def test_intervals_cover_the_truth_about_as_often_as_they_say() -> None:
    order = random.Random(0)
    covered = 0
    for trial in range(200):
        values = [order.gauss(0, 1) for _ in range(40)]
        estimate = ratio(values, [1] * 40, Bootstrap(400, 0.9, trial))
        assert estimate.lower is not None
        assert estimate.upper is not None
        covered += estimate.lower <= 0 <= estimate.upper
    assert 0.8 <= covered / 200 <= 0.96
