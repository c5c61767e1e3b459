"""Models that must be refused, each with its reason; none is ever pruned wrongly and silently."""

from __future__ import annotations

import types

import pytest
import torch
import transformers

import stageprune as sp
from helpers import surface
from stageprune.families.decoder import find_decoder
from stageprune.families.verify import verify_layers
from vlm_zoo import VISION_BY_NAME
from zoo import ARCHITECTURES, BY_NAME, LATENT_ATTENTION, MORE

METHOD = sp.PrefillOnlyPruning(ratio=1 / 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE, ids=lambda architecture: architecture.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_layer_of_every_family_is_verified(architecture, dtype: torch.dtype) -> None:
    decoder = find_decoder(architecture.build(dtype))
    verified = verify_layers(decoder, range(6))
    assert sorted(verified) == list(range(6))


def patched_norm(model) -> None:
    """An attention whose key norm was taken out of its forward."""
    model.model.layers[4].self_attn.k_norm.forward = lambda keys: keys * 1.5


def patched_attention(model) -> None:
    """An attention that scales the keys before it caches them."""
    attention = model.model.layers[5].self_attn
    original = attention.forward

    def forward(self, *args, **kwargs):
        name = "cache" if "cache" in kwargs else "past_key_values"
        cache = kwargs[name]

        class Scaling:
            def update(self, keys, values, *rest, **more):
                return cache.update(keys * 1.01, values, *rest, **more)

        kwargs[name] = Scaling()
        return original(*args, **kwargs)

    attention.forward = types.MethodType(forward, attention)


def unprojected_norm(model) -> None:
    """Qwen3's attention, patched not to use its key norm."""
    attention = model.model.layers[5].self_attn
    original = attention.forward

    def forward(self, *args, **kwargs):
        norm, self.k_norm = self.k_norm, torch.nn.Identity()
        try:
            return original(*args, **kwargs)
        finally:
            self.k_norm = norm

    attention.forward = types.MethodType(forward, attention)


@pytest.mark.parametrize("patch", [patched_attention, unprojected_norm])
def test_a_patched_attention_is_refused_with_layer_and_difference(patch) -> None:
    model = BY_NAME["qwen3"].build(torch.float32)
    patch(model)
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 5 \(Qwen3DecoderLayer\).*keys differ by up to"):
        sp.prune(model, METHOD)
    assert surface(model) == before


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_a_patched_vision_language_model_is_refused(name: str) -> None:
    model = VISION_BY_NAME[name].build(torch.float32)
    attention = model.model.language_model.layers[3].self_attn
    own = attention.forward

    def forward(self, *args, **kwargs):
        norm, self.k_norm = self.k_norm, torch.nn.Identity()
        try:
            return own(*args, **kwargs)
        finally:
            self.k_norm = norm

    attention.forward = types.MethodType(forward, attention)
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 3 \(Qwen3VL.*keys differ by up to"):
        sp.prune(model, sp.PrefillOnlyPruning(1 / 2))
    assert surface(model) == before


def test_a_patched_norm_module_is_used_as_it_is() -> None:
    model = BY_NAME["qwen3"].build(torch.float32)
    patched_norm(model)
    sp.prune(model, METHOD).remove()


def tiny(config_class: str, model_class: str, **options):
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**options)
    return getattr(transformers, model_class)(config).eval()


COMMON = dict(vocab_size=67, hidden_size=32, intermediate_size=48, num_hidden_layers=4, pad_token_id=0)
HEADS = dict(num_attention_heads=4, num_key_value_heads=2)
REFUSED = {
    "gemma3n": (
        lambda: tiny(
            "Gemma3nTextConfig",
            "Gemma3nForCausalLM",
            **(COMMON | HEADS),
            head_dim=8,
            vocab_size_per_layer_input=67,
            hidden_size_per_layer_input=8,
            num_kv_shared_layers=2,
            laurel_rank=4,
            activation_sparsity_pattern=[0.0] * 4,
            layer_types=["full_attention"] * 4,
        ),
        "no keys and values of their own",
    ),
    "mamba": (lambda: tiny("MambaConfig", "MambaForCausalLM", **COMMON), "recurrent state"),
    "recurrent-gemma": (
        lambda: tiny("RecurrentGemmaConfig", "RecurrentGemmaForCausalLM", **(COMMON | HEADS), lru_width=32),
        "recurrent state|no description fits",
    ),
    "rwkv": (lambda: tiny("RwkvConfig", "RwkvForCausalLM", **COMMON, attention_hidden_size=32), "no description fits"),
    "t5": (
        lambda: tiny("T5Config", "T5ForConditionalGeneration", vocab_size=67, d_model=32, d_ff=48, num_layers=2),
        "encoder-decoder",
    ),
    "bert": (lambda: tiny("BertConfig", "BertModel", **COMMON, num_attention_heads=4), "cannot generate"),
    "llama-without-head": (lambda: tiny("LlamaConfig", "LlamaModel", **(COMMON | HEADS)), "cannot generate"),
    "deepseek-v3": (
        lambda: tiny(
            "DeepseekV3Config",
            "DeepseekV3ForCausalLM",
            **(COMMON | HEADS | LATENT_ATTENTION),
        ),
        "no description fits",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_reason_and_left_alone(name: str) -> None:
    build, reason = REFUSED[name]
    model = build()
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match=reason):
        sp.prune(model, METHOD)
    assert surface(model) == before


def test_a_model_that_balances_its_experts_is_refused() -> None:
    model = BY_NAME["mixtral"].build(torch.float32)
    model.config.output_router_logits = True
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match="output_router_logits=False"):
        sp.prune(model, sp.PrefillOnlyPruning(1 / 2))
    assert surface(model) == before


def test_a_compiled_model_is_refused() -> None:
    with pytest.raises(sp.UnsupportedModelError, match="then compile"):
        sp.prune(torch.compile(BY_NAME["llama"].build(torch.float32)), METHOD)
