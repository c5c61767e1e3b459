"""The FLOP model against counts by hand and by torch's own counter."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import stageprune as sp
from stageprune.families.costs import _pairs, head_weights, layer_costs, prompt_flops
from stageprune.families.decoder import find_decoder
from zoo import ARCHITECTURES, BY_NAME, MIXTURES, VOCAB


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


@pytest.mark.parametrize("architecture", ARCHITECTURES + MIXTURES, ids=lambda architecture: architecture.name)
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


def test_a_layer_of_experts_by_hand() -> None:
    """Of five experts a token uses two; router, shared expert and its gate it always uses."""
    cost = layer_costs(find_decoder(BY_NAME["qwen2-moe"].build(torch.float32)))[0]
    attention, router, shared = 32 * (32 + 16 + 16 + 32), 5 * 32, 3 * 32 * 24 + 32
    assert cost.linear == attention + router + shared + 2 * 3 * 32 * 20


PAPERS_MIXTURES = {
    "Qwen1.5-MoE-A2.7B": (
        "Qwen2Moe",
        dict(hidden_size=2048, num_attention_heads=16, num_key_value_heads=16, moe_intermediate_size=1408,
             shared_expert_intermediate_size=5632, num_experts=60, num_experts_per_tok=4),
        (990, 572),
    ),
    "Qwen2-57B-A14B": (
        "Qwen2Moe",
        dict(hidden_size=3584, num_attention_heads=28, num_key_value_heads=4, moe_intermediate_size=2560,
             shared_expert_intermediate_size=20480, num_experts=64, num_experts_per_tok=8),
        (1979, 1400),
    ),
    "Qwen3-30B-A3B": (
        "Qwen3Moe",
        dict(hidden_size=2048, num_attention_heads=32, num_key_value_heads=4, head_dim=128, moe_intermediate_size=768,
             num_experts=128, num_experts_per_tok=8),
        (538, 307),
    ),
}  # fmt: skip
"""Class, shapes, and active channels of an expert at 20 and 40 % (Table 8; digest, section 1.4)."""


@pytest.mark.parametrize("name", PAPERS_MIXTURES)
def test_the_papers_mixtures(name: str) -> None:
    """Shapes only, on the meta device."""
    import transformers

    family, shapes, active = PAPERS_MIXTURES[name]
    config = getattr(transformers, f"{family}Config")(num_hidden_layers=1, **shapes)
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for ratio, expected in zip((0.2, 0.4), active, strict=True):
        with sp.prune(model, sp.OnlineChannelPruning(ratio)) as handle:
            (part,) = handle.report().channels
        assert abs(part.sizes.active - expected) <= 1  # the table is made from ratios rounded to 0.1 %
        per_token, width = shapes["num_experts_per_tok"], shapes["moe_intermediate_size"]
        assert part.dense_weights == per_token * 3 * shapes["hidden_size"] * width
        assert part.experts.total == shapes["num_experts"]
