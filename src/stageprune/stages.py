"""Which of the new positions of a forward pass encode the context (prefill), and which generate (decode).

A forward pass over `q` new positions has one number: `prefill`, how many leading positions are context encoding. The
rest are decode. Inside `generate()` it follows from absolute positions alone: a prompt that ends at position `N`
(positions already in the cache count) has its last token at `N - 1`; every position before that is prefill, that one
and all later ones are decode (the boundary rule of arXiv 2602.03295, section 3.3). So the rule is the same for a plain
prompt, its chunks, a further turn on an existing cache, beams, and the verification of speculated tokens. It is never
guessed from `q > 1`.

Outside `generate()` a forward pass is dense, unless the caller says otherwise with `StageTracker.stage`.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from stageprune.errors import PromptError, StageError
from stageprune.overrides import BeamOverride, MethodOverride

CACHE_NAMES = ("past_key_values", "cache", "layer_past", "past_key_value")
"""What the argument that carries the K/V cache is called: transformers renamed it in 5.24, some families differ."""

_MEMORIES = "_stageprune_memories"
_keys = itertools.count()


@dataclass
class Stage:
    """The stages of one forward pass.

    Attributes:
        prefill: how many leading positions encode the context.
        length: how many new positions the pass has.
        boundary: whether position `prefill` is the last token of the prompt.
        past: how many positions were cached before the pass; only told when some positions are prefill, or always
            after `StageTracker.follow_positions`.
        padding: the 2-D attention mask that `generate()` was given, if any.
        call: the arguments of the model's forward.
        carry: what the layers of this one pass hand to each other; gone when the pass ends.
        memory: what methods remember of the sequences in the K/V cache; lives and dies with the cache.
    """

    prefill: int
    length: int
    boundary: bool
    call: dict[str, Any]
    past: int = 0
    padding: torch.Tensor | None = None
    carry: dict[Any, Any] = field(default_factory=dict)
    memory: dict[Any, Any] = field(default_factory=dict)


@dataclass
class _Prompt:
    """A running `generate()`: where its prompt ends, and whether the prompt's last token has been processed."""

    length: int
    mask: torch.Tensor | None = None
    encoded: bool = False


class _PerThread(threading.local):
    """Stage state of one thread: two threads may run the same pruned model."""

    def __init__(self) -> None:
        self.prompts: list[_Prompt] = []
        self.explicit: list[int] = []
        self.stage: Stage | None = None
        self.dense = False


class StageTracker:
    """Knows the stage of every forward pass of one model, by standing in front of its `generate` and `forward`.

    Args:
        model: the causal language model.
        owner: what `override_owner` shall answer for the model's methods.
    """

    def __init__(self, model: nn.Module, owner: Any = None) -> None:
        self._state = _PerThread()
        self.keeps_prefill_rows = True
        """Whether hidden states of prefill rows reach the language-model head; a method may end them before."""
        self._positions = False
        self._model = model
        self._key = next(_keys)
        self._caches: weakref.WeakSet[Any] = weakref.WeakSet()
        self._parameters = _positional_names(model)
        self._max_length = getattr(_text_config(model), "max_position_embeddings", None)
        # Stages are Python state that changes from call to call. The compiler runs this function as it is and compiles
        # what it calls; a traced copy of the bookkeeping could be executed twice, or once too few. (Not as a
        # decorator: that would import the compiler with this module.)
        staged_forward = torch.compiler.disable(self._forward, recursive=False)  # type: ignore[no-untyped-call]
        wrappers = {"forward": staged_forward, "generate": self._generate, "generate_batch": self._generate_batch}
        self._overrides: list[MethodOverride | BeamOverride] = [
            MethodOverride(model, name, wrapper, owner) for name, wrapper in wrappers.items() if hasattr(model, name)
        ]

    def follow_positions(self) -> None:
        """Tell the position of every pass (`Stage.past`), and let what is remembered follow the beams.

        For methods whose memory changes while tokens are generated. What they put into `Stage.memory` then needs a
        method `reorder(rows)`.
        """
        self._positions = True
        if hasattr(self._model, "generate"):
            self._overrides.append(BeamOverride(self._model, self._reorder))

    def _reorder(self, cache: Any, rows: torch.Tensor) -> None:
        for memory in vars(cache).get(_MEMORIES, {}).get(self._key, {}).values():
            memory.reorder(rows)

    def detach(self) -> None:
        """Give the model its own methods back, and forget what was remembered of caches."""
        for override in reversed(self._overrides):
            override.remove()
        for cache in self._caches:
            vars(cache).get(_MEMORIES, {}).pop(self._key, None)

    @property
    def current(self) -> Stage | None:
        """The stages of the forward pass that this thread is in; None outside one and in dense passes."""
        return self._state.stage

    @contextmanager
    def stage(self, prefill: int) -> Iterator[None]:
        """Declare the stages of the forward passes inside the block: the first `prefill` new positions are context.

        Raises:
            StageError: if `prefill` is no non-negative integer.
        """
        if isinstance(prefill, bool) or not isinstance(prefill, int) or prefill < 0:
            raise StageError(f"prefill counts positions: a non-negative integer, got {prefill!r}")
        self._state.explicit.append(prefill)
        try:
            yield
        finally:
            self._state.explicit.pop()

    @contextmanager
    def dense(self) -> Iterator[None]:
        """`generate()` and forward passes inside the block are dense."""
        outer, self._state.dense = self._state.dense, True
        try:
            yield
        finally:
            self._state.dense = outer

    # -- generate() ---------------------------------------------------------------------------------------------------

    def _generate(self, generate: Any, *args: Any, **kwargs: Any) -> Any:
        if self._state.dense:
            return generate(*args, **kwargs)
        length = prompt_length(*args, **kwargs)
        if length == 0:
            raise PromptError("the prompt is empty; pass at least one token")
        if self._max_length is not None and length > self._max_length:
            raise PromptError(
                f"the prompt has {length} tokens, more than the model's context of {self._max_length} "
                "(max_position_embeddings); shorten the prompt"
            )
        self._state.prompts.append(_Prompt(length, kwargs.get("attention_mask")))
        try:
            return generate(*args, **kwargs)
        finally:
            self._state.prompts.pop()

    def _generate_batch(self, generate_batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._state.dense:
            return generate_batch(*args, **kwargs)
        raise StageError(
            "continuous batching (generate_batch, cache_implementation='paged') packs several prompts into one row, "
            "which stageprune cannot prune; call generate() with a padded batch, or remove the handle first"
        )

    # -- forward() ----------------------------------------------------------------------------------------------------

    def _forward(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._state
        if state.dense or not (state.explicit or state.prompts):
            return forward(*args, **kwargs)
        call = dict(zip(self._parameters, args, strict=False)) | kwargs
        if state.explicit:
            stage = self._explicit_stage(state.explicit[-1], call)
        else:
            stage = _generate_stage(state.prompts[-1], call)
        if self._positions:
            stage.past = _past_length(call)
        cache = _cache(call)
        if cache is not None:
            stage.memory = self._memories(cache).setdefault(self._key, {})
            if stage.prefill and stage.past == 0:
                stage.memory.clear()  # a cache that was reset and is used again
        outer, state.stage = state.stage, stage
        try:
            output = forward(**call)
        finally:
            state.stage = outer
        if cache is None and stage.memory:
            self._remember(output, stage)
        return output

    def _remember(self, output: Any, stage: Stage) -> None:
        """Keep the memory of a pass that began without a cache, if the model made one."""
        cache = _cache(output) if isinstance(output, Mapping) else None
        if cache is not None:
            self._memories(cache)[self._key] = stage.memory

    def _memories(self, cache: Any) -> dict[int, dict[Any, Any]]:
        """What each tracker remembers of a cache. It lies on the cache itself, so that a copy has it, too."""
        self._caches.add(cache)
        memories: dict[int, dict[Any, Any]] = vars(cache).setdefault(_MEMORIES, {})
        return memories

    def _explicit_stage(self, prefill: int, call: dict[str, Any]) -> Stage:
        length = _new_positions(call)
        if prefill > length:
            raise StageError(f"stage(prefill={prefill}) but the forward pass has only {length} new position(s)")
        if prefill:
            if call.get("labels") is not None:
                raise StageError("labels need logits at every position; the pruned positions have none")
            if "logits_to_keep" in self._parameters:
                first = 0 if self.keeps_prefill_rows else prefill
                keep = call.get("logits_to_keep", 0)
                call["logits_to_keep"] = _logits_of_decode_rows(keep, prefill, length, first)
        past = _past_length(call) if prefill else 0
        return Stage(prefill, length, boundary=0 < prefill < length, call=call, past=past)


def prompt_length(*args: Any, **kwargs: Any) -> int:
    """Where the prompt given to `generate(*args, **kwargs)` ends, counted from the start of the cache, in tokens.

    Follows `generate()`: `inputs_embeds` always hold the whole sequence; `input_ids` hold the whole sequence, too,
    unless the attention mask is longer than they are, which says that they are new tokens on top of a cache.
    """
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is not None:
        return int(embeddings.shape[1])
    ids = args[0] if args else kwargs.get("inputs")
    ids = kwargs.get("input_ids") if ids is None else ids
    if ids is None:
        return 1  # generate() starts from the beginning-of-sequence token
    mask = kwargs.get("attention_mask")
    past = _past_length(kwargs)
    new_only = past > 0 and mask is not None and mask.shape[1] != ids.shape[1]
    return int(ids.shape[1]) + (past if new_only else 0)


def _generate_stage(prompt: _Prompt, call: dict[str, Any]) -> Stage:
    """The stages of one forward pass inside `generate()`, by absolute positions."""
    length = _new_positions(call)
    if prompt.encoded and _cache(call) is not None:
        return Stage(0, length, boundary=False, call=call)
    past, last = _past_length(call), prompt.length - 1
    prompt.encoded = past + length > last
    prefill = min(max(last - past, 0), length)
    boundary = past <= last < past + length
    return Stage(prefill, length, boundary, call=call, past=past, padding=prompt.mask)


def _logits_of_decode_rows(keep: int | torch.Tensor, prefill: int, length: int, first: int) -> int | torch.Tensor:
    """`logits_to_keep` for the language-model head, or an error if a pruned position's logits are asked for.

    Args:
        keep: as the caller gave it, of all `length` positions.
        prefill: how many leading ones are pruned.
        length: of the pass.
        first: the position of the first row that reaches the head.
    """
    decode = length - prefill
    if isinstance(keep, torch.Tensor):
        if keep.ndim != 1 or keep.dtype == torch.bool:
            raise StageError("with pruned positions, logits_to_keep must be a number or a 1-D tensor of positions")
        positions = torch.where(keep < 0, keep + length, keep)
        if positions.numel() and int(positions.min()) < prefill:
            raise StageError(
                f"logits_to_keep asks for position {int(positions.min())}, but positions 0 to {prefill - 1} are "
                "pruned and have no logits"
            )
        return positions - first
    if decode == 0 and keep == 0:
        return torch.empty(0, dtype=torch.long)  # a chunk of context has no logits, and none were asked for
    if keep == 0 or keep > decode:
        asked = f"all {length} positions (logits_to_keep=0)" if keep == 0 else f"the last {keep} positions"
        raise StageError(
            f"logits of {asked} were asked for, but the first {prefill} of {length} are pruned and have none; "
            + (f"pass logits_to_keep={decode} or less" if decode else "leave logits_to_keep out")
        )
    return keep


def _positional_names(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters.values()
    return [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _cache(call: Mapping[str, Any]) -> Any:
    for name in CACHE_NAMES:
        if call.get(name) is not None:
            return call[name]
    return None


def _past_length(call: dict[str, Any]) -> int:
    cache = _cache(call)
    return 0 if cache is None else int(cache.get_seq_length())


def _new_positions(call: dict[str, Any]) -> int:
    tokens = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    if tokens is None:
        raise StageError("the forward pass has neither input_ids nor inputs_embeds")
    return int(tokens.shape[1])
