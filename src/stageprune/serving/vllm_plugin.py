"""The entry point `vllm.general_plugins`: vLLM calls `register()` in each of its processes.

Without a `"stageprune"` override, or a `stageprune.json` in the checkpoint's folder, vLLM stays its own self.
"""

from __future__ import annotations

from typing import Any

FAMILIES = ("Llama", "Qwen2", "Qwen3", "Gemma3", "Mistral")
"""The families of models that can be pruned in vLLM."""

ARCHITECTURES = {f"{family}ForCausalLM": f"Stageprune{family}ForCausalLM" for family in FAMILIES}
"""The architectures that can be pruned, and the names of their pruned classes."""


def register() -> None:
    """Make the pruned classes known to vLLM, and let it look for settings."""
    from vllm import ModelRegistry
    from vllm.config.model import ModelConfig

    from stageprune.serving.vllm import compat

    problem: compat.EngineError | None = None
    try:
        compat.check()
    except compat.EngineError as error:
        problem = error  # raised only where somebody asks for pruning: others share this engine

    def choose_class(self: Any) -> None:
        _choose_class(self, problem)

    compat.before(ModelConfig, "get_model_arch_config", choose_class)
    if problem is not None:
        return
    for name in ARCHITECTURES.values():
        ModelRegistry.register_model(name, f"stageprune.serving.vllm.models:{name}")
    from stageprune.serving.vllm import restrictions

    restrictions.install()
    compat.key_blocks()
    compat.key_handshakes()


def _choose_class(model_config: Any, problem: Exception | None) -> None:
    """Read the settings of a model that is about to be loaded, and name the class that follows them."""
    from stageprune.errors import StagePruneError
    from stageprune.serving.vllm import compat

    try:
        _choose(model_config, problem)
    except StagePruneError as error:
        if compat.in_command_line():
            raise SystemExit(f"error: {error}") from error
        raise


def _choose(model_config: Any, problem: Exception | None) -> None:
    from stageprune.serving.vllm.compat import EngineError
    from stageprune.serving.vllm.settings import engine_settings
    from stageprune.settings_file import settings_beside

    config = model_config.hf_config
    requested = getattr(config, "stageprune", None)
    if requested is None:
        beside = settings_beside(model_config.model)
        requested = None if beside is None else {"settings": str(beside)}
    if requested is None or requested is False or getattr(config, "stageprune_engine", None) is not None:
        return
    if problem is not None:
        raise problem
    settings = engine_settings(requested, config.get_text_config().num_hidden_layers)
    if settings is None:
        return
    architecture = (config.architectures or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise EngineError(
            f"{architecture} cannot be pruned in vLLM; supported: {', '.join(ARCHITECTURES)} (stageprune generate and "
            "stageprune serve --engine transformers know more)"
        )
    config.stageprune_engine = settings.to_dict()
    config.architectures = [ARCHITECTURES[architecture]]
