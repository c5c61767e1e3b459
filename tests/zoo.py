"""Tiny random-weight models of every supported architecture, and the ones that must be refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn

VOCAB = 67


@dataclass(frozen=True)
class Architecture:
    """How to build one tiny model.

    Attributes:
        name: of the case.
        model_class: of transformers.
        config_class: of transformers.
        options: of the configuration, on top of the common ones.
    """

    name: str
    model_class: str
    config_class: str
    options: dict[str, Any] = field(default_factory=dict)

    def build(
        self, dtype: torch.dtype = torch.float64, attn: str = "eager", seed: int = 0, experts: str = "eager"
    ) -> Any:
        torch.manual_seed(seed)
        common: dict[str, Any] = dict(
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=6,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=None,
        )
        config = getattr(transformers, self.config_class)(**(common | self.options))
        config._attn_implementation = attn
        config._experts_implementation = experts  # the others cannot do float64
        model = getattr(transformers, self.model_class)(config).to(dtype).eval()
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        return unsettled(model)


def unsettled(model: nn.Module) -> nn.Module:
    """Random norms and biases, larger weights: fresh models have norms of one and biases of zero, which hide errors."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
            if parameter.ndim == 1:
                parameter.add_(0.2 * noise)
            elif "embed" not in name:
                parameter.add_(0.1 * noise)
    return model


ARCHITECTURES = [
    Architecture("llama", "LlamaForCausalLM", "LlamaConfig"),
    Architecture("llama-bias", "LlamaForCausalLM", "LlamaConfig", dict(attention_bias=True, mlp_bias=True)),
    Architecture("mistral", "MistralForCausalLM", "MistralConfig", dict(sliding_window=None)),
    Architecture("mistral-sliding", "MistralForCausalLM", "MistralConfig", dict(sliding_window=7)),
    Architecture("qwen2", "Qwen2ForCausalLM", "Qwen2Config"),
    Architecture("qwen3", "Qwen3ForCausalLM", "Qwen3Config", dict(head_dim=12)),
    Architecture(
        "gemma2",
        "Gemma2ForCausalLM",
        "Gemma2Config",
        dict(head_dim=8, sliding_window=7, query_pre_attn_scalar=8),
    ),
    Architecture(
        "gemma3",
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        dict(
            head_dim=8,
            sliding_window=7,
            query_pre_attn_scalar=8,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        ),
    ),
    Architecture("phi3", "Phi3ForCausalLM", "Phi3Config", dict(sliding_window=None)),
    Architecture("olmo2", "Olmo2ForCausalLM", "Olmo2Config"),
    Architecture(
        "granite",
        "GraniteForCausalLM",
        "GraniteConfig",
        dict(residual_multiplier=0.7, embedding_multiplier=2.0, attention_multiplier=0.3, logits_scaling=1.5),
    ),
    Architecture("smollm3", "SmolLM3ForCausalLM", "SmolLM3Config", dict(no_rope_layers=[1, 1, 0] * 2)),
    Architecture("cohere", "CohereForCausalLM", "CohereConfig"),
    Architecture("cohere-qk-norm", "CohereForCausalLM", "CohereConfig", dict(use_qk_norm=True)),
    Architecture(
        "cohere2",
        "Cohere2ForCausalLM",
        "Cohere2Config",
        dict(sliding_window=7, layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2),
    ),
    Architecture("gpt-neox", "GPTNeoXForCausalLM", "GPTNeoXConfig", dict(num_key_value_heads=4)),
    Architecture(
        "gpt-neox-sequential",
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        dict(num_key_value_heads=4, use_parallel_residual=False),
    ),
    Architecture("falcon-7b", "FalconForCausalLM", "FalconConfig", dict(multi_query=True, alibi=False)),
    Architecture(
        "falcon-40b",
        "FalconForCausalLM",
        "FalconConfig",
        dict(new_decoder_architecture=True, num_kv_heads=2, alibi=False),
    ),
]

# Not promised one by one, but the generic description fits them: a cheap way to notice when it stops.
MORE = [
    Architecture("phi", "PhiForCausalLM", "PhiConfig", dict(num_key_value_heads=4)),
    Architecture("stablelm", "StableLmForCausalLM", "StableLmConfig", dict(num_key_value_heads=4)),
    Architecture("starcoder2", "Starcoder2ForCausalLM", "Starcoder2Config", dict(sliding_window=7)),
    Architecture("olmo", "OlmoForCausalLM", "OlmoConfig"),
    Architecture("glm", "GlmForCausalLM", "GlmConfig", dict(head_dim=8)),
    Architecture("glm4", "Glm4ForCausalLM", "Glm4Config", dict(head_dim=8)),
    Architecture("gemma", "GemmaForCausalLM", "GemmaConfig", dict(head_dim=8)),
    Architecture("helium", "HeliumForCausalLM", "HeliumConfig", dict(head_dim=8)),
    Architecture("nemotron", "NemotronForCausalLM", "NemotronConfig"),
    Architecture("exaone4", "Exaone4ForCausalLM", "Exaone4Config", dict(sliding_window=7, sliding_window_pattern=3)),
    Architecture("seed-oss", "SeedOssForCausalLM", "SeedOssConfig", dict(head_dim=8)),
    Architecture("hunyuan", "HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", dict(head_dim=8)),
    Architecture("ernie4.5", "Ernie4_5ForCausalLM", "Ernie4_5Config", dict(head_dim=8)),
    Architecture("arcee", "ArceeForCausalLM", "ArceeConfig"),
]

MIXTURES = [
    Architecture(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=20, shared_expert_intermediate_size=24),
    ),
    Architecture(
        "qwen2-moe-mixed",
        "Qwen2MoeForCausalLM",
        "Qwen2MoeConfig",
        dict(
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=20,
            shared_expert_intermediate_size=24,
            mlp_only_layers=[0],
            norm_topk_prob=True,
        ),
    ),
    Architecture(
        "qwen3-moe",
        "Qwen3MoeForCausalLM",
        "Qwen3MoeConfig",
        dict(head_dim=8, num_experts=5, num_experts_per_tok=3, moe_intermediate_size=20),
    ),
    Architecture(
        "mixtral",
        "MixtralForCausalLM",
        "MixtralConfig",
        dict(num_local_experts=4, intermediate_size=20, sliding_window=None),
    ),
    Architecture(
        "olmoe", "OlmoeForCausalLM", "OlmoeConfig", dict(num_experts=5, num_experts_per_tok=2, intermediate_size=20)
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        "GptOssConfig",
        dict(
            num_local_experts=4,
            num_experts_per_tok=2,
            intermediate_size=20,
            head_dim=8,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=7,
            rope_parameters=dict(rope_type="default", rope_theta=10000.0),
        ),
    ),
]
"""Two layers each: routed experts, with a shared one in Qwen2-MoE, with biases and another gate in GPT-OSS."""
for _mixture in MIXTURES:
    _mixture.options["num_hidden_layers"] = 2

LATENT_ATTENTION: dict[str, Any] = dict(
    moe_intermediate_size=16, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
    first_k_dense_replace=1, q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8,
)  # fmt: skip
"""What DeepSeek-V3 has beside the common sizes."""

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES + MORE + MIXTURES}
