"""Responses are samples of the model's own distribution, whatever its settings and the batch."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from helpers import surface, tokens
from stageprune.prefill.responses import sample_responses
from zoo import BY_NAME

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (9, 5, 7, 3)]


@pytest.fixture(scope="module")
def model():
    return BY_NAME["llama"].build(torch.float32)


def test_neither_batch_nor_order_matters(model) -> None:
    together = sample_responses(model, PROMPTS, range(4), seed=1, max_tokens=8)
    assert [len(response) for response in together] == [8] * 4
    for index in range(4):
        assert sample_responses(model, [PROMPTS[index]], [index], seed=1, max_tokens=8) == [together[index]]
    assert sample_responses(model, PROMPTS[::-1], [3, 2, 1, 0], seed=1, max_tokens=8) == together[::-1]


def test_seed_and_index_matter(model) -> None:
    def response(seed: int, index: int) -> list[int]:
        return sample_responses(model, PROMPTS[:1], [index], seed=seed, max_tokens=8)[0]

    assert len({tuple(response(seed, index)) for seed in (0, 1) for index in (0, 1)}) == 4


def test_the_models_generation_settings_do_not_matter(model) -> None:
    expected = sample_responses(model, PROMPTS, range(4), seed=2, max_tokens=6)
    plain = model.generation_config
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.1, top_k=2, top_p=0.1, repetition_penalty=9.0, min_new_tokens=50, pad_token_id=0,
        suppress_tokens=list(range(30)), num_beams=3, no_repeat_ngram_size=1,
    )  # fmt: skip
    settings = model.generation_config
    before = surface(model)
    try:
        assert sample_responses(model, PROMPTS, range(4), seed=2, max_tokens=6) == expected
        assert model.generation_config is settings
    finally:
        model.generation_config = plain
    assert surface(model) == before


@torch.no_grad()
def test_the_distribution_is_the_softmax(model) -> None:
    count = 4000
    first = [r[0] for r in sample_responses(model, PROMPTS[:1] * count, range(count), seed=0, max_tokens=1)]
    probability = model(torch.tensor(PROMPTS[:1])).logits[0, -1].double().softmax(-1)
    expected = probability * count
    often = expected >= 5
    counts = torch.bincount(torch.tensor(first), minlength=len(expected)).double()
    observed, theory = counts[often], expected[often]
    chi_squared = ((observed - theory) ** 2 / theory).sum().item()
    degrees = int(often.sum())
    assert degrees > 10
    assert chi_squared < degrees + 4 * (2 * degrees) ** 0.5


@pytest.mark.parametrize("ends", [5, [5, 40]], ids=["one", "two"])
def test_an_end_token_ends_the_response_and_belongs_to_it(model, ends) -> None:
    endless = sample_responses(model, PROMPTS * 10, range(40), seed=0, max_tokens=12)
    model.generation_config.eos_token_id = ends
    try:
        ended = sample_responses(model, PROMPTS * 10, range(40), seed=0, max_tokens=12)
    finally:
        model.generation_config.eos_token_id = None
    stops = {ends} if isinstance(ends, int) else set(ends)
    for long, short in zip(endless, ended, strict=True):
        stop = next((place for place, token in enumerate(long) if token in stops), len(long) - 1)
        assert short == long[: stop + 1]
    assert any(len(response) < 12 for response in ended)
