"""The FLOP model against counts by hand and by torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import stageprune as sp
from stageprune.families.costs import _pairs, head_weights, layer_costs, prompt_flops
from stageprune.families.decoder import find_decoder
from zoo import ARCHITECTURES, BY_NAME, VOCAB


@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize(("rows", "past"), [(1, 0), (7, 0), (1, 9), (5, 2), (12, 30)])
def test_attended_pairs_by_enumeration(rows: int, past: int, window: int | None) -> None:
    by_hand = sum(
        1
        for query in range(past, past + rows)
        for key in range(past + rows)
        if key <= query and (window is None or query - key < window)
    )
    assert _pairs(rows, past, window) == by_hand


def test_a_llama_layer_by_hand() -> None:
    decoder = find_decoder(BY_NAME["llama"].build(torch.float32))
    cost = layer_costs(decoder)[0]
    assert cost.linear == 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48
    assert cost.kv == 2 * 32 * 16
    assert cost.flops(5, 0) == 2 * (5 * cost.linear + 15 * 2 * 4 * 8)
    assert head_weights(decoder) == 32 * VOCAB


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_linear_parts_equal_what_torch_counts(architecture) -> None:
    """With one token there is one attended pair, so torch's dense attention count is exact, too."""
    model = architecture.build(torch.float32)
    decoder = find_decoder(model)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.ones(1, 1, dtype=torch.long), use_cache=False)
    counted = counter.get_total_flops()
    rotary = sum(count for count in counter.get_flop_counts().get(type(model).__name__, {}).values()) - counted
    assert rotary <= 0
    assert prompt_flops(decoder, 1) == pytest.approx(counted, rel=0.02)


def test_pruned_flops_by_hand() -> None:
    decoder = find_decoder(BY_NAME["llama"].build(torch.float32))
    cost = layer_costs(decoder)[0]
    by_hand = 2 * head_weights(decoder) + 4 * cost.flops(10, 0) + 2 * (cost.kv_flops(9) + cost.flops(1, 9))
    assert prompt_flops(decoder, 10, {4, 5}) == by_hand


def test_ideal_speedup_of_llama_8b_is_as_the_papers_upper_bound() -> None:
    """Digest section 3.7: 1.43x at 10 of 32 layers, from depth alone; shapes only, on the meta device."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        decoder = find_decoder(transformers.LlamaForCausalLM(config).eval())
    free = set(range(22, 32))
    assert prompt_flops(decoder, 2048) / prompt_flops(decoder, 2048, free) == pytest.approx(1.43, abs=0.01)
    assert layer_costs(decoder)[0].kv / layer_costs(decoder)[0].linear == pytest.approx(0.0385, abs=0.0005)
    assert sp.PrefillOnlyPruning().ratio == 1 / 3
