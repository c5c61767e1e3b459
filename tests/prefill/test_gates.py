"""Virtual gates: at the right place in every family, and gone without a trace."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch

import stageprune as sp
from families.test_verify import REFUSED
from helpers import InFloat64, close, in_float64, left_padded, surface, tokens
from reference.prefill_oracle import gated_logits, layers_of
from stageprune.families.branches import find_branches
from stageprune.families.decoder import find_decoder
from stageprune.prefill.gates import VirtualGates, open_gates, prefill_gates
from zoo import ARCHITECTURES, BY_NAME, LATENT_ATTENTION, MORE, Architecture

LENGTH, CONTEXT = 13, 9
ALL = ARCHITECTURES + MORE

# Mixtures of experts, and attention whose keys and values nothing here can project: for gates they are like the others.
GATED_ONLY = [
    Architecture("mixtral", "MixtralForCausalLM", "MixtralConfig", dict(num_local_experts=4)),
    Architecture(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        dict(head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    ),
    Architecture(
        "deepseek-v3",
        "DeepseekV3ForCausalLM",
        "DeepseekV3Config",
        dict(num_key_value_heads=4, **LATENT_ATTENTION),
    ),
]


@pytest.mark.parametrize("architecture", ALL + GATED_ONLY, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_family_is_verified(architecture: Any, dtype: torch.dtype) -> None:
    branches = find_branches(find_decoder(architecture.build(dtype)))
    assert len(branches) == 6
    # The norms behind the branches, where there are some, are part of them.
    for part in branches:
        for place in ("post_feedforward_layernorm", "post_mlp_layernorm"):
            if hasattr(part.layer, place):
                assert part.ffn is getattr(part.layer, place)
                assert part.attention is not part.layer.self_attn


@pytest.mark.parametrize("name", sorted(REFUSED.keys() - {"deepseek-v3"}))
def test_refused_with_a_reason_and_left_alone(name: str) -> None:
    model = REFUSED[name][0]()
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 0 \(|encoder-decoder|cannot generate"):
        VirtualGates(model)
    assert surface(model) == before


def scaled_stream(layer: Any) -> Any:
    """A layer whose residual stream is scaled, so that it is not its input at gates of 0."""
    original = layer.forward
    return lambda self, *args, **kwargs: original(*args, **kwargs) * 1.5


def gain_behind(layer: Any) -> Any:
    """A layer that multiplies what it adds with a number that depends on it."""
    original = layer.forward

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        added = original(hidden_states, **kwargs) - hidden_states
        return hidden_states + added * added.abs().amax(-1, keepdim=True)

    return forward


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("patch", [scaled_stream, gain_behind])
def test_an_unknown_layer_is_refused_by_name(patch: Any, dtype: torch.dtype) -> None:
    model = BY_NAME["llama"].build(dtype)
    layer = model.model.layers[3]
    layer.forward = types.MethodType(patch(layer), layer)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 3 \(LlamaDecoderLayer\)"):
        VirtualGates(model)


def test_a_norm_behind_a_branch_that_has_another_name_is_refused() -> None:
    """A gate in front of it would be right at 0 and at 1, and nowhere else."""
    model = BY_NAME["gemma2"].build(torch.bfloat16)
    layer = model.model.layers[2]
    norm = layer.post_attention_layernorm
    del layer.post_attention_layernorm
    object.__setattr__(layer, "post_attention_layernorm", lambda states: norm(states))
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 2 .*not grow in proportion"):
        VirtualGates(model)


@pytest.mark.parametrize("name", ["llama", "gemma3", "cohere", "falcon-7b"])
@torch.no_grad()
def test_open_gates_change_no_bit_and_closed_gates_leave_the_embeddings(name: str) -> None:
    model = BY_NAME[name].build(torch.bfloat16)
    ids = tokens(2, LENGTH)
    dense = model(ids, use_cache=False).logits
    with VirtualGates(model) as gates:
        assert torch.equal(model(ids, use_cache=False).logits, dense)
        with gates.at(open_gates(1, 6), open_gates(2, 6), CONTEXT):
            assert torch.equal(model(ids, use_cache=False).logits, dense)
        closed = torch.zeros(1, 6)
        for layer in layers_of(model):
            layer.register_forward_hook(unchanged, with_kwargs=True)
        with gates.at(closed, closed, CONTEXT):
            model(ids, use_cache=False)


def unchanged(module: Any, args: Any, kwargs: Any, output: Any) -> None:
    arrived = args[0] if args else kwargs["hidden_states"]
    assert torch.equal(output[0] if isinstance(output, tuple) else output, arrived)


@pytest.mark.parametrize("architecture", ALL, ids=lambda architecture: architecture.name)
@torch.no_grad()
def test_prefill_gates_of_zero_are_prefill_only_pruning(architecture: Any) -> None:
    model, skipped = architecture.build(), (1, 4, 5)
    ids, mask = left_padded([LENGTH, LENGTH - 5])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with in_float64(model):
        expected = gated_logits(model, skipped, CONTEXT, **inputs)[:, CONTEXT:]
        with VirtualGates(model) as gates, gates.at(prefill_gates(skipped, 6), open_gates(1, 6), CONTEXT):
            ours = model(**inputs, use_cache=False).logits[:, CONTEXT:]
    assert close(ours, expected) < 1e-10
    with InFloat64(), sp.prune(model, sp.PrefillOnlyPruning(layers=skipped)) as handle, handle.stage(prefill=CONTEXT):
        pruned = model(**inputs, logits_to_keep=LENGTH - CONTEXT, use_cache=False).logits
    assert close(ours, pruned) < 1e-10


def test_the_model_is_the_original_again_also_after_an_error() -> None:
    model = BY_NAME["gemma3"].build()
    before, weights = surface(model), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(KeyError), VirtualGates(model) as gates, gates.at(open_gates(1, 6), open_gates(1, 6), 3):  # noqa: PT012
        assert surface(model) != before
        raise KeyError
    assert surface(model) == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_wrong_use_says_so() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    with VirtualGates(model) as gates, pytest.raises(sp.SettingError, match=r"\(1, 5\).*\[batch or 1, 6\]"):  # noqa: SIM117
        with gates.at(torch.ones(1, 5), torch.ones(1, 6), 3):
            pass
    with sp.prune(model, sp.PrefillOnlyPruning()), pytest.raises(sp.AlreadyPrunedError, match="remove"):
        VirtualGates(model)
    with pytest.raises(sp.UnsupportedModelError, match="training mode"):
        VirtualGates(model.train())
