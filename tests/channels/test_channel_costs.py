"""The cost of a generated token against the formulas of the digest (section 4.4) and the paper's Table 6 and 8."""

from __future__ import annotations

import pytest

from stageprune import OnlineChannelPruning
from stageprune.channels.costs import dense_cost, pruned_cost, scoring_flops
from stageprune.channels.sizes import mlp_ratio_of, sizes_of
from stageprune.methods.online_channels import Selection

# model: d, h, layers, attention parameters of a layer, FFN parameters of a layer (active routed experts), MLP ratios %
SHAPES = {
    "Llama-2-7B": (4096, 11008, 32, 4 * 4096**2, 3 * 4096 * 11008, 29.9, 59.8),
    "Llama-2-13B": (5120, 13824, 40, 4 * 5120**2, 3 * 5120 * 13824, 29.9, 59.8),
    "Llama-2-70B": (8192, 28672, 80, 2 * 8192 * (8192 + 1024), 3 * 8192 * 28672, 24.3, 48.6),
    "Llama-3.1-8B": (4096, 14336, 32, 2 * 4096 * (4096 + 1024), 3 * 4096 * 14336, 24.8, 49.5),
    "Llama-3.1-70B": (8192, 28672, 80, 2 * 8192 * (8192 + 1024), 3 * 8192 * 28672, 24.3, 48.6),
    "Qwen3-8B": (4096, 12288, 36, 2 * 4096 * (4096 + 1024), 3 * 4096 * 12288, 25.6, 51.1),
    "Qwen3-32B": (5120, 25600, 64, 2 * 5120 * (8192 + 1024), 3 * 5120 * 25600, 24.8, 49.6),
    "Qwen1.5-MoE-A2.7B": (2048, 1408, 24, 4 * 2048**2, 4 * 3 * 2048 * 1408, 29.7, 59.4),
    "Qwen2-57B-A14B": (3584, 2560, 28, 2 * 3584 * (3584 + 512), 8 * 3 * 3584 * 2560, 22.7, 45.3),
    "Qwen3-30B-A3B": (2048, 768, 48, 2 * 2048 * (4096 + 512), 8 * 3 * 2048 * 768, 30.0, 60.0),
    "Qwen2-VL-7B": (3584, 18944, 28, 2 * 3584 * (3584 + 512), 3 * 3584 * 18944, 22.9, 45.8),
    "Qwen2.5-VL-7B": (3584, 18944, 28, 2 * 3584 * (3584 + 512), 3 * 3584 * 18944, 22.9, 45.8),
}


@pytest.mark.parametrize("name", SHAPES)
def test_all_ratios_of_table_8(name: str) -> None:
    _, _, _, attention, ffn, at_20, at_40 = SHAPES[name]
    assert round(100 * mlp_ratio_of(0.2, attention, ffn), 1) == at_20
    assert round(100 * mlp_ratio_of(0.4, attention, ffn), 1) == at_40


@pytest.mark.parametrize("delta", [0.05, 0.1])
def test_flops_are_the_formulas(delta: float) -> None:
    d, h, r = 64, 1000, 0.3

    def flops(selection: Selection, gated: bool = True, up_share: float | None = None) -> int:
        method = OnlineChannelPruning(mlp_ratio=r, partition_fraction=2 * delta, selection=selection, up_share=up_share)
        return pruned_cost(d, sizes_of(h, r, method), selection, gated).flops

    dense = dense_cost(d, h).flops
    assert dense == 6 * d * h
    assert flops("fixed") == pytest.approx(6 * d * (1 - r) * h)
    assert flops("partition") == pytest.approx(6 * d * (1 - r) * h + 4 * d * delta * h)
    assert (flops("partition") - flops("fixed")) / dense == pytest.approx(2 * delta / 3)
    assert flops("full") == pytest.approx(4 * d * h + 2 * d * (1 - r) * h)
    assert flops("gate") == pytest.approx(2 * d * (1 - r + delta) * h + 4 * d * (1 - r) * h)
    assert flops("cascade", up_share=0.72) == pytest.approx(2 * d * (1 - r + delta + 0.72 + 1 - r) * h)
    assert flops("partition", gated=False) == pytest.approx(2 * d * (1 - r + delta) * h + 2 * d * (1 - r) * h)


@pytest.mark.parametrize(
    ("name", "dense", "full", "partition"), [("Llama-2-7B", 22.09, 7.32, 0.63), ("Llama-3.1-8B", 28.75, 9.56, 1.00)]
)
def test_table_6(name: str, dense: float, full: float, partition: float) -> None:
    d, h, layers, attention, ffn, *_ = SHAPES[name]
    tokens, decode = 10 * 255, 10 * 127  # batch 10; 128 prompt tokens and 127 decode steps (digest, section 4.3)
    tera = 1e12

    def scoring(selection: Selection) -> int:
        method = OnlineChannelPruning(ratio=0.2, selection=selection)
        return scoring_flops(d, sizes_of(h, mlp_ratio_of(0.2, attention, ffn), method), selection)

    assert dense_cost(d, h).flops * layers * tokens / tera == pytest.approx(dense, rel=0.002)
    assert scoring("full") * layers * decode / tera == pytest.approx(full, rel=0.003)
    assert scoring("fixed") == 0
    # The paper's own figures lie 14 % below and 5 % above what 10 % candidates need (it does not say why).
    assert scoring("partition") * layers * decode / tera == pytest.approx(partition, rel=0.17)
    assert scoring("partition") == pytest.approx(4 * d * 0.1 * h, rel=1e-3)
