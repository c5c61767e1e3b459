"""What `doctor` says of published configurations, by hand and by the papers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig

import stageprune as sp
from stageprune.evaluate.support import support_of_config
from stageprune.families.decoder import find_decoder
from stageprune.families.image_size import image_cost
from stageprune.families.vision import vision_flops
from vlm_zoo import SIZES, VISION_BY_NAME

THIRD = sp.PrefillOnlyPruning(1 / 3)
LLAMA = dict(
    model_type="llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
)  # fmt: skip
QWEN3_VL = dict(
    model_type="qwen3_vl",
    text_config=dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936,
    ),
    vision_config=dict(
        depth=27, hidden_size=1152, intermediate_size=4304, num_heads=16, out_hidden_size=4096, patch_size=16,
        deepstack_visual_indexes=[8, 16, 24],
    ),
)  # fmt: skip
GEMMA3 = dict(
    model_type="gemma3",
    text_config=dict(
        hidden_size=3840, intermediate_size=15360, num_hidden_layers=48, num_attention_heads=16, num_key_value_heads=8,
        head_dim=256, vocab_size=262208,
    ),
    vision_config=dict(hidden_size=1152, intermediate_size=4304, num_hidden_layers=27, image_size=896, patch_size=14),
)  # fmt: skip
QWEN1_5_MOE = dict(
    model_type="qwen2_moe", hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
    shared_expert_intermediate_size=5632, num_hidden_layers=24, num_attention_heads=16, num_key_value_heads=16,
    num_experts=60, num_experts_per_tok=4,
)  # fmt: skip
QWEN3_MOE = dict(
    model_type="qwen3_moe", hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=48,
    num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=128, num_experts_per_tok=8,
)  # fmt: skip
GPT_OSS = dict(
    model_type="gpt_oss", hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
    num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
)  # fmt: skip
PUBLISHED: dict[str, tuple[dict[str, Any], str, int, float, float]] = {
    "Llama-3.1-8B": (LLAMA, "text", 10, 8.0, 0.248),
    "Qwen3-VL-8B": (QWEN3_VL, "vision-language", 12, 8.8, 0.256),
    "Gemma-3-12B": (GEMMA3, "vision-language", 16, 12.2, 0.253),
    "Qwen1.5-MoE-A2.7B": (QWEN1_5_MOE, "mixture of experts", 8, 14.3, 0.297),
    "Qwen3-30B-A3B": (QWEN3_MOE, "mixture of experts", 16, 30.5, 0.300),
    "gpt-oss-20b": (GPT_OSS, "mixture of experts", 8, 20.9, 0.253),
}
"""Configuration, kind, layers that a third is, billions of parameters, MLP ratio at 20 % (paper 2, Table 8)."""


def config_of(data: dict[str, Any]) -> Any:
    values = dict(data)
    return AutoConfig.for_model(values.pop("model_type"), **values)


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configurations(name: str) -> None:
    data, kind, skipped, billions, mlp_ratio = PUBLISHED[name]
    support = support_of_config(config_of(data), THIRD)
    assert support.supported
    assert support.channels.supported
    assert support.kind == kind
    assert len(support.skipped_layers) == skipped
    assert support.parameters is not None
    assert support.parameters / 1e9 == pytest.approx(billions, rel=0.02)
    assert support.channels.mlp_ratio == pytest.approx(mlp_ratio, abs=0.002)
    assert all(1.3 < gain < 1.5 for _, gain in support.ideal_speedups)
    assert all(1.05 < gain < 1.25 for _, gain in support.channels.ideal_decode_speedups)


def test_the_other_ratio_of_table_8() -> None:
    found = support_of_config(config_of(QWEN1_5_MOE), THIRD, sp.OnlineChannelPruning(0.4))
    assert found.channels.mlp_ratio == pytest.approx(0.594, abs=0.001)


def test_llama_by_hand() -> None:
    """A layer has 4096 x (4096 + 1024 + 1024 + 4096) + 3 x 4096 x 14336 weights; 1000 tokens, the head once."""
    attention, ffn, kv = 4096 * (2 * 4096 + 2 * 1024), 3 * 4096 * 14336, 4096 * 2048
    pairs = 1000 * 1001 // 2
    layer = 1000 * (attention + ffn) + 2 * 4096 * pairs
    free = 999 * kv + attention + ffn + 2 * 4096 * 1000
    head = 4096 * 128256
    expected = (head + 32 * layer) / (head + 22 * layer + 10 * free)
    found = support_of_config(config_of(LLAMA), THIRD, lengths=[1000])
    assert found.ideal_speedups == ((1000, pytest.approx(expected, rel=1e-12)),)
    active = 14336 - round(0.2 * (attention + ffn) / ffn * 14336)  # of the gate and the up projection more are computed
    assert found.channels.mlp_ratio == pytest.approx(1 - active / 14336, abs=1e-4)


def test_lengths_beyond_the_context_are_left_out() -> None:
    found = support_of_config(config_of(LLAMA | {"max_position_embeddings": 512}), THIRD)
    assert [length for length, _ in found.ideal_speedups] == [128, 512]


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl", "qwen3-vl-moe"])
@torch.no_grad()
def test_an_image_costs_what_the_encoder_computes(name: str) -> None:
    """Counted while it runs, with eager attention; Qwen2.5-VL attends in windows, which do not divide these images."""
    kind = VISION_BY_NAME[name]
    model = kind.build(torch.float32)
    decoder = find_decoder(model)
    for parts in ([[2, ("image", 4, 8)]], [[2, ("image", 6, 4)]], [[1, ("image", 12, 20)]], SIZES):
        inputs = kind.inputs(model, parts)
        sizes = [(part[2], part[1]) for prompt in parts for part in prompt if isinstance(part, tuple)]
        costs = [image_cost(model, 4 * width, 4 * height) for width, height in sizes]
        assert sum(cost.tokens for cost in costs) == sum(width * height // 4 for width, height in sizes)
        assert sum(cost.flops for cost in costs) == vision_flops(decoder, inputs)


def test_images_of_the_papers_table_2() -> None:
    """The gain falls with the resolution, as in the paper, and is lower than that of the language model alone."""
    found = support_of_config(config_of(QWEN3_VL), THIRD).images
    assert [image.size for image in found] == ["640x480", "1280x720", "1920x1080", "2560x1440"]
    with_encoder = [image.ideal_speedup for image in found]
    assert with_encoder == sorted(with_encoder, reverse=True)
    paper = (1.19, 1.19, 1.18, 1.16)
    for image, measured in zip(found, paper, strict=True):
        assert measured < image.ideal_speedup < image.ideal_language_speedup < 1.5


@pytest.mark.parametrize(
    ("model_type", "says"),
    [("t5", "encoder-decoder"), ("mamba", "recurrent state"), ("deepseek_v3", "no description fits its attention")],
)
def test_refused_with_the_reason(model_type: str, says: str) -> None:
    found = support_of_config(AutoConfig.for_model(model_type, num_hidden_layers=4), THIRD)
    assert not found.supported
    assert found.reason is not None
    assert says in found.reason


def test_an_image_encoder() -> None:
    found = support_of_config(transformers.SamConfig(), THIRD)
    assert not found.supported
    assert found.kind == "image encoder"
    assert found.channels.supported
    assert found.channels.mlp_ratio == pytest.approx(0.3, abs=0.001), "4 d^2 of attention, 8 d^2 of the FFN"
