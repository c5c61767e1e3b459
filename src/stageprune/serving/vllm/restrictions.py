"""What a pruned engine refuses, as it would silently give wrong answers: each with a message that says so."""

from __future__ import annotations

from typing import Any

from stageprune.serving.vllm import compat
from stageprune.serving.vllm.compat import EngineError
from stageprune.serving.vllm.settings import EngineSettings

# Drafters that read tokens, not the hidden states of every prompt token.
_DRAFTERS = ("ngram", "ngram_gpu", "suffix", "draft_model")
# Connectors whose stores are told apart: by the keys of blocks, by a folder, or by a handshake.
_CONNECTORS = ("ExampleConnector", "SharedStorageConnector", "NixlConnector", "OffloadingConnector")


def install() -> None:
    """Check engines when they are configured, and requests when they arrive."""
    from vllm.config.vllm import VllmConfig
    from vllm.entrypoints.generate.beam_search.offline import BeamSearchOfflineMixin
    from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
    from vllm.v1.engine.input_processor import InputProcessor

    compat.after(VllmConfig, "try_verify_and_update_config", _check_engine)
    compat.before(InputProcessor, "process_inputs", _check_request)
    compat.before(BeamSearchOnlineMixin, "beam_search", _refuse_beams)
    compat.before(BeamSearchOfflineMixin, "beam_search", _refuse_beams)


def _check_engine(result: Any, vllm_config: Any) -> Any:
    settings = None if vllm_config.model_config is None else compat.settings_of(vllm_config)
    if settings is not None:
        try:
            check_engine(vllm_config, settings)
        except EngineError as error:
            if compat.in_command_line():
                raise SystemExit(f"error: {error}") from error
            raise
    return result


def check_engine(vllm_config: Any, settings: EngineSettings) -> None:
    """Refuse features that a pruned prompt cannot have; the rest is set as pruned steps need it.

    Raises:
        EngineError: names the feature and what to do.
    """
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    if model.runner_type != "generate":
        raise EngineError(
            "embeddings and classes need every layer for every token; start the engine without stageprune"
        )
    if vllm_config.lora_config is not None:
        raise EngineError("LoRA adapters do not reach the K/V projections of skipped layers; merge them into the model")
    if speculative is not None and speculative.method not in _DRAFTERS:
        raise EngineError(
            f"the drafter {speculative.method!r} reads hidden states of every prompt token, which skipped layers do "
            "not compute; use n-gram drafting (method 'ngram')"
        )
    if parallel.decode_context_parallel_size > 1 or getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        raise EngineError("context parallelism is not supported; use tensor or pipeline parallelism")
    if getattr(parallel, "enable_dbo", False) or getattr(parallel, "use_ubatching", False):
        raise EngineError("dual batch overlap is not supported; leave --enable-dbo out")
    if getattr(vllm_config, "use_v2_model_runner", False):
        raise EngineError("vLLM's second model runner is not supported yet; set VLLM_USE_V2_MODEL_RUNNER=0")
    if getattr(model.hf_config, "dual_chunk_attention_config", None):
        raise EngineError("dual chunk attention is not supported")
    if transfer is not None:
        _keep_stores_apart(transfer, settings)


def _keep_stores_apart(transfer: Any, settings: EngineSettings) -> None:
    """Make the settings a part of the place or the name under which a connector keeps keys and values."""
    name = transfer.kv_connector
    if name not in _CONNECTORS:
        raise EngineError(
            f"the KV connector {name} does not tell caches of a pruned model from others, which would mix; supported: "
            f"{', '.join(_CONNECTORS)}"
        )
    extra = transfer.kv_connector_extra_config
    if name in ("ExampleConnector", "SharedStorageConnector") and settings.fingerprint not in str(
        extra.get("shared_storage_path", "")
    ):
        folder = extra.get("shared_storage_path", "/tmp")
        extra["shared_storage_path"] = f"{folder}/stageprune-{settings.fingerprint}"


def _check_request(self: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any) -> None:
    settings = compat.settings_of(self.vllm_config)
    if settings is None:
        return
    if settings.role == "prefill" and getattr(params, "max_tokens", None) != 1:
        raise compat.bad_request(
            "this instance only encodes prompts for another one: max_tokens must be 1, and the token says nothing"
        )
    # 0 alternatives are still the log-probabilities of the prompt's own tokens.
    if (
        getattr(params, "prompt_logprobs", None) is not None
        or getattr(params, "prompt_logprob_token_ids", None) is not None
    ):
        raise compat.bad_request(
            "prompt log-probabilities (prompt_logprobs, or echo with logprobs) need every layer for every prompt "
            "token; this server skips layers while it reads the prompt"
        )


def _refuse_beams(self: Any, *args: Any, **kwargs: Any) -> None:
    """vLLM sends every step of a beam as a new prompt, with the tokens that were generated before at its end."""
    if compat.settings_of(compat.config_of(self)) is not None:
        raise compat.bad_request(
            "beam search (use_beam_search) would read generated tokens as a prompt, and this server skips layers "
            "while it reads the prompt; leave it out, or ask a server without stageprune"
        )
