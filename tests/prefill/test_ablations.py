"""The paper's ablations (Table 3) against the oracle with the same part taken out."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, close, generate, left_padded, tokens
from reference.generation import greedy
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")

SKIPPED = (4, 5)


@pytest.fixture(scope="module", params=["llama", "gemma3", "mistral-sliding"])
def model(request):
    return BY_NAME[request.param].build()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_without_boundary_handling_the_last_prompt_token_is_pruned_too(model, padded: bool, chunk) -> None:
    ids, mask = left_padded([12, 7]) if padded else (tokens(1, 12), None)
    everywhere = torch.ones_like(ids, dtype=torch.bool)
    expected, logits = greedy(model, SKIPPED, ids, 4, attention_mask=mask, context=everywhere)
    with sp.prune(model, sp.PrefillOnlyPruning(boundary=False)):
        sequences, ours = generate(model, ids, 4, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("layers", ["first", "interleaved", (3,)])
def test_without_boundary_handling_for_other_layers(layers) -> None:
    model = BY_NAME["llama"].build()
    method = sp.PrefillOnlyPruning(layers=layers, boundary=False)
    with sp.prune(model, method) as handle:
        skipped = handle.report().skipped_layers
        _, ours = generate(model, tokens(1, 12), 4)
    _, logits = greedy(model, skipped, tokens(1, 12), 4, context=torch.ones(1, 12, dtype=torch.bool))
    assert close(ours, logits) < 1e-10


def test_a_prompt_of_one_token_without_boundary_handling() -> None:
    model = BY_NAME["llama"].build()
    _, logits = greedy(model, SKIPPED, tokens(1, 1), 3, context=torch.ones(1, 1, dtype=torch.bool))
    with sp.prune(model, sp.PrefillOnlyPruning(boundary=False)):
        _, ours = generate(model, tokens(1, 1), 3)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("chunk", [None, 4])
def test_without_kv_projection_skipped_layers_see_decode_rows_only(model, padded: bool, chunk) -> None:
    ids, mask = left_padded([12, 7]) if padded else (tokens(1, 12), None)
    expected, logits = greedy(model, SKIPPED, ids, 9, attention_mask=mask, hide_context=True)
    with sp.prune(model, sp.PrefillOnlyPruning(kv_projection=False)):
        sequences, ours = generate(model, ids, 9, attention_mask=mask, prefill_chunk_size=chunk)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


def test_without_both() -> None:
    model = BY_NAME["llama"].build()
    context = torch.ones(1, 12, dtype=torch.bool)
    _, logits = greedy(model, SKIPPED, tokens(1, 12), 4, context=context, hide_context=True)
    with sp.prune(model, sp.PrefillOnlyPruning(kv_projection=False, boundary=False)):
        _, ours = generate(model, tokens(1, 12), 4)
    assert close(ours, logits) < 1e-10


def test_without_kv_projection_in_sdpa_and_without_a_mask() -> None:
    model = BY_NAME["llama"].build()
    _, logits = greedy(model, SKIPPED, tokens(1, 12), 4, hide_context=True)
    model.set_attn_implementation("sdpa")
    with sp.prune(model, sp.PrefillOnlyPruning(kv_projection=False)):
        _, ours = generate(model, tokens(1, 12), 4)
    assert close(ours, logits) < 1e-10


def test_without_kv_projection_only_single_prompts_on_dynamic_caches() -> None:
    model = BY_NAME["llama"].build()
    with sp.prune(model, sp.PrefillOnlyPruning(kv_projection=False)):
        with pytest.raises(sp.StageError, match="static cache"):
            generate(model, tokens(1, 12), 3, cache_implementation="static")
        cache = DynamicCache(config=model.config)
        sequences, _ = generate(model, tokens(1, 12), 3, **{CACHE: cache})
        with pytest.raises(sp.StageError, match="single prompts"):
            generate(model, torch.cat((sequences, tokens(1, 5)), 1), 3, **{CACHE: cache})


@pytest.mark.parametrize(("name", "layers", "kind"), [("llama", "first", "full"), ("gemma3", (2, 5), "full")])
def test_without_kv_projection_the_layers_that_place_the_positions_must_stay(name: str, layers, kind: str) -> None:
    model = BY_NAME[name].build()
    with pytest.raises(sp.SettingError, match=kind):
        sp.prune(model, sp.PrefillOnlyPruning(layers=layers, kv_projection=False))
