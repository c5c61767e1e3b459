"""Closeness to the dense model, against values computed by hand."""

from __future__ import annotations

import pytest
import torch

import stageprune as sp
from helpers import tokens
from reference.prefill_oracle import gated_logits
from stageprune.evaluate.quality import closeness, dense_cases
from zoo import BY_NAME


@pytest.fixture(scope="module")
def model():
    return BY_NAME["llama"].build(torch.float32)


@pytest.fixture(scope="module")
def cases(model):
    return dense_cases(model, [tokens(1, 12)[0].tolist(), tokens(1, 7, seed=1)[0].tolist()], new_tokens=4)


def test_nothing_pruned_is_no_distance(model, cases) -> None:
    with sp.prune(model, sp.PrefillOnlyPruning(0)) as handle:
        quality = closeness(handle, cases)
    assert quality.kl == pytest.approx(0, abs=1e-9)
    assert quality.agreement == 1
    assert quality.tokens == 8


def test_the_dense_answers_are_greedy(model, cases) -> None:
    for case in cases:
        assert torch.equal(case.log_probabilities.argmax(-1), case.answer[0])


@torch.no_grad()
def test_divergence_by_hand(model, cases) -> None:
    expected, same = [], []
    for case in cases:
        whole = torch.cat((case.prompt, case.answer[:, :-1]), 1)
        first = case.prompt.shape[1] - 1
        dense = torch.distributions.Categorical(logits=model(whole).logits[0, first:])
        pruned = torch.distributions.Categorical(
            logits=gated_logits(model, (3, 4, 5), first, input_ids=whole)[0, first:]
        )
        expected.append(torch.distributions.kl_divergence(dense, pruned))
        same.append((dense.logits.argmax(-1) == pruned.logits.argmax(-1)).float())
    with sp.prune(model, sp.PrefillOnlyPruning(0.5)) as handle:
        quality = closeness(handle, cases)
    assert quality.kl == pytest.approx(torch.cat(expected).mean().item(), rel=1e-4)
    assert quality.kl > 1e-3
    assert quality.agreement == pytest.approx(torch.cat(same).mean().item())
    assert quality.kl_per_prompt == pytest.approx([part.mean().item() for part in expected], rel=1e-4)
