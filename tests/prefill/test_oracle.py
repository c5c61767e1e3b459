"""The fast path against the oracle: every supported family, attention backend, layer choice and padding."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, InFloat64, close, generate, left_padded, tokens
from reference.generation import greedy
from reference.prefill_oracle import gated_logits
from stageprune.prefill.layers import skipped_layers
from zoo import ARCHITECTURES, MORE, Architecture

LENGTH = 17


@pytest.fixture
def in_float64():
    with InFloat64():
        yield


CHOICES = ["last", "first", "interleaved", (1, 3, 5), (2, 3), (5,), (0, 1, 2, 3, 4, 5)]


def cases(architectures: list[Architecture]) -> list[object]:
    return [
        pytest.param(architecture, attn, id=f"{architecture.name}-{attn}")
        for architecture in architectures
        for attn in ("eager", "sdpa")
    ]


def build(architecture: Architecture, attn: str, dtype: torch.dtype = torch.float64):
    model = architecture.build(dtype, "eager")
    if attn == "sdpa" and not model._supports_sdpa:
        pytest.skip(f"transformers offers no sdpa attention for {architecture.name} in this version")
    model.set_attn_implementation(attn)
    return model


@torch.no_grad()
def worst_difference(model, method: sp.PrefillOnlyPruning, padded: bool, prefill: int) -> float:
    """Between the logits of the decode rows and the oracle's."""
    inputs = {"input_ids": tokens(2, LENGTH)}
    if padded:
        ids, mask = left_padded([LENGTH, LENGTH - 6])
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    skipped = skipped_layers(method, model.config.num_hidden_layers)
    reference = gated_logits(model, skipped, prefill, **inputs)[:, prefill:]
    with sp.prune(model, method) as handle, handle.stage(prefill=prefill):
        cache = DynamicCache(config=model.config)
        output = model(**inputs, logits_to_keep=LENGTH - prefill, **{CACHE: cache})
    assert cache.get_seq_length() == LENGTH
    return close(output.logits, reference)


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize(("architecture", "attn"), cases(ARCHITECTURES + MORE))
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_float64_equals_the_oracle(architecture: Architecture, attn: str, padded: bool) -> None:
    model = build(architecture, attn)
    for layers in CHOICES:
        for prefill in (LENGTH - 1, LENGTH - 4):
            method = sp.PrefillOnlyPruning(layers=layers)
            assert worst_difference(model, method, padded, prefill) < 1e-10, (layers, prefill)


@pytest.mark.parametrize(("architecture", "attn"), cases(ARCHITECTURES))
def test_float32_equals_the_oracle(architecture: Architecture, attn: str) -> None:
    model = build(architecture, attn, torch.float32)
    for padded in (False, True):
        for layers in ("last", "interleaved"):
            assert worst_difference(model, sp.PrefillOnlyPruning(layers=layers), padded, LENGTH - 1) < 1e-5


@pytest.mark.usefixtures("in_float64")
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
@torch.no_grad()
def test_generate_equals_the_oracle_token_by_token(architecture: Architecture) -> None:
    model = architecture.build()
    ids, mask = left_padded([13, 6])
    expected, logits = greedy(model, (4, 5), ids, 5, attention_mask=mask)
    with sp.prune(model, sp.PrefillOnlyPruning(ratio=1 / 3)):
        sequences, ours = generate(model, ids, 5, attention_mask=mask)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


@torch.no_grad()
def test_without_a_cache_the_last_layers_still_see_the_context() -> None:
    model = ARCHITECTURES[0].build()
    ids = tokens(2, LENGTH)
    reference = gated_logits(model, (4, 5), LENGTH - 3, input_ids=ids)[:, -3:]
    with sp.prune(model, sp.PrefillOnlyPruning()) as handle, handle.stage(prefill=LENGTH - 3):
        output = model(ids, use_cache=False, logits_to_keep=3)
    assert close(output.logits, reference) < 1e-10


@torch.no_grad()
def test_the_oracle_itself_differs_from_dense() -> None:
    """Else everything above would hold for a method that prunes nothing."""
    model = ARCHITECTURES[0].build()
    ids = tokens(1, LENGTH)
    dense = model(ids).logits[:, -1]
    gated = gated_logits(model, (4, 5), LENGTH - 1, input_ids=ids)[:, -1]
    assert close(gated, dense) > 1e-3
