"""Mixtures of experts against the oracles: both methods, every way to generate, prompts of several lengths."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stageprune as sp
from helpers import close, exact_logits, left_padded, log_probability, three_beams
from reference import vision as ref
from reference.generation import greedy
from zoo import MIXTURES, Architecture

pytestmark = pytest.mark.usefixtures("everything_in_float64")

CHANNELS = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3, scope="sequence")
METHODS: dict[str, tuple[tuple[int, ...], Any]] = {
    "prefill": ((1,), None),
    "prefill-first": ((0,), None),
    "prefill-all": ((0, 1), None),
    "channels": ((), CHANNELS),
    "both": ((1,), CHANNELS),
}
"""Layers that the prompt skips, and what is done to channels."""

every_mixture = pytest.mark.parametrize("architecture", MIXTURES, ids=lambda architecture: architecture.name)
every_method = pytest.mark.parametrize("methods", METHODS)


def prompts() -> dict[str, torch.Tensor]:
    ids, mask = left_padded([13, 6])
    return dict(input_ids=ids, attention_mask=mask)


def pruned(model: Any, methods: str) -> sp.Handle:
    layers, channels = METHODS[methods]
    return sp.prune(
        model, *([sp.PrefillOnlyPruning(layers=layers)] if layers else []), *([channels] if channels else [])
    )


def generated(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    with exact_logits(model) as logits:
        sequences = model.generate(**prompts(), max_new_tokens=4, **options)
    return sequences, torch.stack(logits[-4:], dim=1)


def reference(model: Any, methods: str, sequences: torch.Tensor) -> torch.Tensor:
    """Of the new tokens."""
    inputs = prompts()
    layers, channels = METHODS[methods]
    return ref.logits_of(model, inputs, sequences, layers, channels)[:, inputs["input_ids"].shape[1] - 1 : -1]


@every_mixture
@every_method
@torch.no_grad()
def test_greedy_and_sampled_sequences(architecture: Architecture, methods: str) -> None:
    model = architecture.build()
    torch.manual_seed(0)
    with pruned(model, methods):
        chosen, logits = generated(model, do_sample=False)
        sampled, others = generated(model, do_sample=True, top_k=0)
    expected = reference(model, methods, chosen)
    assert close(logits, expected) < 1e-10
    assert torch.equal(expected.argmax(-1), chosen[:, -4:])
    assert close(others, reference(model, methods, sampled)) < 1e-10


@every_mixture
@every_method
@torch.no_grad()
def test_beams_are_scored_by_the_pruned_model(architecture: Architecture, methods: str) -> None:
    model, inputs = architecture.build(), prompts()
    with pruned(model, methods):
        wholes, scores = three_beams(model, inputs)
    length = inputs["input_ids"].shape[1]
    for beam in range(3):
        expected = log_probability(reference(model, methods, wholes[:, beam]), wholes[:, beam, length:])
        assert close(scores[:, beam], expected) < 1e-6


@every_mixture
@torch.no_grad()
def test_the_oracle_of_other_families_says_the_same(architecture: Architecture) -> None:
    """Greedy generation by gates alone, without what the oracle above shares with images."""
    model, inputs = architecture.build(), prompts()
    expected, logits = greedy(model, (1,), inputs["input_ids"], 4, attention_mask=inputs["attention_mask"])
    with sp.prune(model, sp.PrefillOnlyPruning(layers=(1,))):
        sequences, ours = generated(model, do_sample=False)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10
