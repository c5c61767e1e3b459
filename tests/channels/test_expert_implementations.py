"""Channel pruning of routed experts with each way that transformers has to run them."""

from __future__ import annotations

import pytest
import torch

import stageprune as sp
from helpers import InFloat64, close, generate, left_padded
from reference.channel_oracle import greedy
from zoo import BY_NAME

METHOD = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_transformers(implementation: str) -> None:
    """In float32: the grouped one cannot do float64."""
    model = BY_NAME["qwen2-moe"].build(torch.float32, experts=implementation)
    ids, mask = left_padded([8, 5])
    reference = BY_NAME["qwen2-moe"].build()
    with InFloat64():
        expected, logits = greedy(reference, METHOD, ids, 2, attention_mask=mask)
    dense = BY_NAME["qwen2-moe"].build(torch.float32)
    _, eager = generate(dense, ids[:1, :1], 2)
    with sp.prune(model, METHOD):
        _, alone = generate(model, ids[:1, :1], 2)  # dense, by the module's own forward
        sequences, ours = generate(model, ids, 2, attention_mask=mask)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-4
    assert close(alone, eager) < 1e-4
