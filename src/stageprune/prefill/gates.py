"""Virtual gates: a number per layer and stage that multiplies both residual branches (arXiv 2602.03295, Eq. 5).

    y = x + Attn(x) * g,    x' = y + FFN(y) * g

At `g = 1` a layer is the original; at `g = 0` it returns its input, and its keys and values are still computed from
what arrives. Each stage has its gates: those of prefill act on the positions before the last prompt token, those of
decode on that one and all later ones. As attention is causal, one forward over prompt and response with gates that
depend on the position is exactly the two-stage process of Eq. 10 to 12. Prefill gates of 0 at the skipped layers, and
1 everywhere else, are exactly prefill-only pruning.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Self

import torch
from torch import nn

from stageprune.errors import AlreadyPrunedError, SettingError, UnsupportedModelError
from stageprune.families.branches import find_branches, gate_branch, gate_dtype
from stageprune.families.decoder import find_decoder
from stageprune.overrides import MethodOverride, overridden


class VirtualGates(AbstractContextManager["VirtualGates"]):
    """Gates on the branches of a model's layers, as a context manager; afterwards the model is the original again.

    The model computes as always until `at` sets the gates:

        with VirtualGates(model) as gates, gates.at(prefill, decode, context=prompt_length - 1):
            logits = model(input_ids=tokens, use_cache=False).logits

    Args:
        model: a decoder-only causal language model of transformers, in evaluation mode and not pruned.

    Attributes:
        decoder: the model, taken apart.
        branches: of each layer, in order.
        dtype: of gates and of sums over them: float32, or float64 if the weights are.

    Raises:
        UnsupportedModelError: if the branches of a layer are not found; names the layer and the reason.
        AlreadyPrunedError: if the model is pruned.
    """

    def __init__(self, model: nn.Module) -> None:
        decoder = find_decoder(model)
        if overridden((model, *decoder.layers), "forward"):
            raise AlreadyPrunedError(
                f"this {type(model).__name__} is pruned; gates are for the original: call remove() on its handle first"
            )
        if model.training:
            raise UnsupportedModelError(f"this {type(model).__name__} is in training mode; call model.eval() first")
        self.decoder = decoder
        self.branches = find_branches(decoder)
        self.dtype = gate_dtype(decoder.model.get_input_embeddings().weight)  # type: ignore[operator]
        self._gates: tuple[torch.Tensor, torch.Tensor] | None = None
        self._context = 0
        self._overrides: list[MethodOverride] = []

    @contextmanager
    def at(self, prefill: torch.Tensor, decode: torch.Tensor, context: int) -> Iterator[None]:
        """Gate the forward passes inside the block; passes without a cache, whose rows are all positions.

        Args:
            prefill: gates of the positions that encode the context, `[batch or 1, num_hidden_layers]`.
            decode: gates of all later positions, likewise.
            context: how many leading positions encode the context. In a batch that is padded on the left, the width
                of the prompts minus one: padding is masked, so its gates act on nothing.

        Raises:
            SettingError: if the shapes do not fit the model.
        """
        for name, gates in (("prefill", prefill), ("decode", decode)):
            if gates.ndim != 2 or gates.shape[1] != len(self.branches):
                raise SettingError(
                    f"{name} gates have shape {tuple(gates.shape)}; the model needs [batch or 1, {len(self.branches)}]"
                )
        outer = self._gates, self._context
        self._gates, self._context = (prefill.to(self.dtype), decode.to(self.dtype)), context
        try:
            yield
        finally:
            self._gates, self._context = outer

    def _gate(self, layer: int, length: int) -> torch.Tensor | None:
        """The gates of one layer by position, `[batch or 1, length]`."""
        if self._gates is None:
            return None
        prefill, decode = (gates[:, layer, None] for gates in self._gates)
        in_context = torch.arange(length, device=prefill.device) < self._context
        return torch.where(in_context, prefill, decode)

    def __enter__(self) -> Self:
        for index, branches in enumerate(self.branches):
            for module in (branches.attention, branches.ffn):
                self._overrides.append(gate_branch(module, lambda rows, index=index: self._gate(index, rows)))  # type: ignore[misc]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for override in reversed(self._overrides):
            override.remove()
        self._overrides.clear()


def open_gates(count: int, num_hidden_layers: int) -> torch.Tensor:
    """Gates that change nothing, `[count, num_hidden_layers]`."""
    return torch.ones(count, num_hidden_layers)


def prefill_gates(skipped: tuple[int, ...], num_hidden_layers: int) -> torch.Tensor:
    """The prefill gates of prefill-only pruning: 0 at the skipped layers; `[1, num_hidden_layers]`."""
    gates = open_gates(1, num_hidden_layers)
    gates[:, list(skipped)] = 0
    return gates
