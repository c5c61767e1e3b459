"""Where experts are found, and which modules are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import stageprune as sp
from reference.prefill_oracle import layers_of
from stageprune.errors import SettingError, UnsupportedModelError
from stageprune.families.experts import describe_experts
from zoo import BY_NAME, MIXTURES

METHOD = sp.OnlineChannelPruning(mlp_ratio=0.4)


@pytest.mark.parametrize("architecture", MIXTURES, ids=lambda architecture: architecture.name)
def test_every_class_is_described(architecture: Any) -> None:
    model = architecture.build()
    for index, layer in enumerate(layers_of(model)):
        found = describe_experts(index, layer)
        if not hasattr(layer.mlp, "experts"):
            assert found is None
            continue
        assert found is not None
        assert len(found.experts) == layer.mlp.experts.num_experts
        assert (found.intermediate_size, found.hidden_size) == (20, 32)
        assert (found.shared is None) == (not hasattr(layer.mlp, "shared_expert"))
        assert not list(found.experts[0].down.linear.parameters()), "views, not copies"


def refused(model: Any, *says: str, method: Any = METHOD, error: type = UnsupportedModelError) -> None:
    before = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(error) as caught:
        sp.prune(model, method)
    assert all(text in str(caught.value) for text in says), str(caught.value)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == before


def test_experts_that_compute_something_else() -> None:
    model = BY_NAME["mixtral"].build()
    experts = layers_of(model)[1].mlp.experts
    own = type(experts).forward
    experts.forward = lambda *args: 1.01 * own(experts, *args)
    refused(model, "layer 1", "MixtralExperts", "differs from its description")


@pytest.mark.parametrize("limit", [5.0, 7.5])
def test_a_gate_that_differs_only_for_large_values(limit: float) -> None:
    model = BY_NAME["mixtral"].build()
    experts = layers_of(model)[0].mlp.experts

    def clamped(both: torch.Tensor) -> torch.Tensor:
        gate, up = both.chunk(2, dim=-1)
        return experts.act_fn(gate.clamp(max=limit)) * up

    experts._apply_gate = clamped
    refused(model, "layer 0", "MixtralExperts")


def test_experts_of_several_processes() -> None:
    model = BY_NAME["mixtral"].build()
    layers_of(model)[0].mlp.experts._is_expert_parallel = True
    refused(model, "layer 0", "expert parallelism")


def test_experts_that_their_block_calls_one_by_one() -> None:
    model = BY_NAME["qwen2-moe"].build()
    mlp = layers_of(model)[0].mlp
    mlp.experts = nn.ModuleList([mlp.shared_expert])
    refused(model, "layer 0", "one by one")


def test_unknown_experts() -> None:
    model = BY_NAME["mixtral"].build()
    del layers_of(model)[0].mlp.experts.act_fn
    refused(model, "layer 0", "MixtralExperts", "gate_up_proj")


@pytest.mark.parametrize("backend", ["sliced", "indexed"])
def test_backends_that_are_not_for_experts(backend: str) -> None:
    refused(BY_NAME["olmoe"].build(), "layer 0", backend, method=sp.OnlineChannelPruning(0.2, backend=backend))


@pytest.mark.parametrize(
    "setting", [dict(unseen="some"), dict(unseen_below=0), dict(unseen_below=1.5), dict(routing_weights=1),
                dict(shared_experts=None)], ids=str,
)  # fmt: skip
def test_wrong_settings(setting: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match=next(iter(setting))):
        sp.OnlineChannelPruning(**setting)


def test_the_report_names_shared_experts() -> None:
    model = BY_NAME["qwen2-moe"].build()
    with sp.prune(model, sp.OnlineChannelPruning(0.2, shared_experts=True)) as handle:
        report = handle.report(8)
    assert [(part.layer, part.shared) for part in report.channels] == [(0, False), (0, True), (1, False), (1, True)]
    assert "channels of 2 of 2 FFNs" in str(report)
    assert str(report).count("shared expert") == 2
    assert report.to_dict()["channels"][0]["experts"] == {"total": 5, "per_token": 2, "prompt_tokens": None}
