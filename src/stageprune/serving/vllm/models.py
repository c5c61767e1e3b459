"""vLLM's own model classes, pruned: out of tree, and as little code as possible."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.model_executor.models.gemma3 import Gemma3ForCausalLM
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2ForCausalLM
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM

from stageprune.serving.vllm import compat
from stageprune.serving.vllm.steps import PrunedSteps


class Pruned:
    """Comes before a class of vLLM: steps with context rows go another way, all others vLLM's own."""

    def __init__(self, *, vllm_config: Any, prefix: str = "", **kwargs: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **kwargs)  # type: ignore[call-arg]
        settings = compat.settings_of(vllm_config)
        assert settings is not None, "the plugin chooses this class only for a model with settings"
        self.stageprune = PrunedSteps(self.model, settings)  # type: ignore[attr-defined]

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """`hidden_states`, `[rows, hidden_size]`; those of context rows say nothing, and nobody reads them."""
        step = self.stageprune.current()
        if step is None and self.stageprune.settings.role == "both":
            return super().forward(input_ids, positions, intermediate_tensors, inputs_embeds, **kwargs)  # type: ignore[misc]
        return self.stageprune.run(step, self.model, input_ids, positions, intermediate_tensors, inputs_embeds)  # type: ignore[attr-defined]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Load the checkpoint, then give skipped layers their K/V projections."""
        loaded: set[str] = super().load_weights(self.stageprune.needed(weights))  # type: ignore[misc]
        self.stageprune.bind(self.model)  # type: ignore[attr-defined]
        return loaded | {name for name, _ in self.named_parameters() if name.startswith("stageprune.")}  # type: ignore[attr-defined]


class StagepruneLlamaForCausalLM(Pruned, LlamaForCausalLM):
    """Llama."""


class StagepruneQwen2ForCausalLM(Pruned, Qwen2ForCausalLM):
    """Qwen2 and Qwen2.5."""


class StagepruneQwen3ForCausalLM(Pruned, Qwen3ForCausalLM):
    """Qwen3."""


class StagepruneGemma3ForCausalLM(Pruned, Gemma3ForCausalLM):
    """Gemma3, text only."""


class StagepruneMistralForCausalLM(Pruned, MistralForCausalLM):
    """Mistral."""
