"""A step with context rows: skipped layers project their keys and values, and run for the decode rows alone."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import nn

from stageprune.serving.vllm import compat
from stageprune.serving.vllm.projections import FittedWeights, KeyValueLinear
from stageprune.serving.vllm.settings import EngineSettings

# vLLM's layers pass on two tensors whose sum is the residual stream.
Stream: TypeAlias = tuple[torch.Tensor, torch.Tensor]

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")
_PREFILL_PARTS = ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.qkv_proj",
                  "self_attn.k_norm")  # fmt: skip


class PrunedSteps(nn.Module):
    """What a pruned model has beside its own parts.

    Args:
        model: vLLM's decoder.
        settings: of the engine.
    """

    def __init__(self, model: Any, settings: EngineSettings) -> None:
        super().__init__()
        self.settings = settings
        compat.watch_steps()
        self.skipped = [index for index in settings.layers if model.start_layer <= index < model.end_layer]
        self.linears = nn.ModuleDict()
        self._fitted = None if settings.projections is None else FittedWeights(settings.projections)
        self._attention: Any = None
        for index in self.skipped:
            layer = model.layers[index]
            attention = layer.self_attn.attn
            backend = compat.decode_backend(attention.get_attn_backend())
            attention.get_attn_backend = lambda backend=backend: backend
            self._attention = self._attention or attention
            self.linears[str(index)] = KeyValueLinear(layer.self_attn, prefix=f"stageprune.{index}")
            if settings.role == "prefill":
                layer.mlp, layer.post_attention_layernorm = None, None
                layer.self_attn.o_proj = None

    def needed(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights of a checkpoint without those that an instance for prompts does not hold."""
        for name, weight in weights:
            found = _LAYER.search(name)
            if found is not None and int(found[1]) in self.settings.layers:
                if self._fitted is not None:
                    self._fitted.see(int(found[1]), found[2], weight)
                if self.settings.role == "prefill" and not found[2].startswith(_PREFILL_PARTS):
                    continue
            yield name, weight

    def bind(self, model: Any) -> None:
        """Give the K/V projections their weights, once the model has its own.

        Raises:
            UnsupportedModelError: if fitted projections are of another model.
        """
        if self._fitted is not None:
            self._fitted.check()
        for index in self.skipped:
            attention = model.layers[index].self_attn
            linear: Any = self.linears[str(index)]
            linear.bind(attention, None if self._fitted is None else self._fitted.of(index, attention))
            if self.settings.role == "prefill":
                linear.copy()
                attention.qkv_proj, attention.q_norm = None, None
        self._fitted = None

    def current(self) -> compat.Step | None:
        """This step's rows; None if none of them encodes context, or this worker has no skipped layer."""
        return None if self._attention is None else compat.current_step(self._attention)

    def run(
        self,
        step: compat.Step | None,
        model: Any,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        incoming: Any,
        embeds: torch.Tensor | None,
    ) -> Any:
        """One step.

        Args:
            step: its rows; None while an instance for prompts warms up, which then skips the layers altogether.
            model: vLLM's decoder.
            input_ids: `[rows]`.
            positions: `[rows]`.
            incoming: what the worker before this one passed on, in a pipeline.
            embeds: `[rows, hidden_size]`, in place of `input_ids`.

        Returns:
            As vLLM's decoder.
        """
        if incoming is not None:
            stream: Stream = incoming["hidden_states"], incoming["residual"]
        else:
            hidden = model.embed_input_ids(input_ids) if embeds is None else embeds
            stream = hidden, torch.zeros_like(hidden)
        decode: Stream | None = None  # of the decode rows, while layers are skipped
        context = None
        for index in range(model.start_layer, model.end_layer):
            layer = model.layers[index]
            if index not in self.skipped:
                stream = self._joined(stream, decode, step)
                decode = None
                stream = layer(positions, *stream)
                continue
            if step is None:
                continue
            if decode is None:
                context = stream[0][step.context] + stream[1][step.context]
                decode = stream[0][step.decode], stream[1][step.decode]
            decode = self._skip(index, layer, context, decode, positions, step)
        stream = self._joined(stream, decode, step)
        if compat.passes_on():
            return compat.passed_on(*stream)
        hidden, _ = model.norm(*stream)
        return hidden

    def _skip(
        self, index: int, layer: Any, context: Any, decode: Stream, positions: torch.Tensor, step: compat.Step
    ) -> Stream:
        attention = layer.self_attn.attn
        own = compat.current_step(attention)
        assert own is not None
        keys, values = self.linears[str(index)](
            layer.self_attn, layer.input_layernorm(context), positions[step.context]
        )
        compat.write_cache(attention, keys, values, own.context_slots)
        if not len(step.decode):
            compat.hand_over(attention)
            return decode
        with compat.decoding(attention, own.decode_slots):
            return layer(positions[step.decode], *decode)  # type: ignore[no-any-return]

    @staticmethod
    def _joined(stream: Stream, decode: Stream | None, step: compat.Step | None) -> Stream:
        """All rows again; those of the context are as they came."""
        if decode is None or step is None:
            return stream
        whole = stream[0].clone(), stream[1].clone()
        for target, source in zip(whole, decode, strict=True):
            target[step.decode] = source
        return whole
