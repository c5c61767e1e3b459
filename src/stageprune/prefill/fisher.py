"""The gradients of a response's loss by the virtual gates: one forward and one backward pass for all layers and stages.

    L = -sum_t log P(response_t | prompt, response_<t)                                  (Eq. 12)

summed over the response, not averaged, since only the sum is the log-probability whose squared gradient is Fisher
information. Every sample of a batch has gates of its own, so that gradients can be squared one by one (Eq. 9, 13).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from stageprune.overrides import MethodOverride
from stageprune.prefill.gates import VirtualGates


@dataclass(frozen=True)
class GateGradients:
    """Of a batch of samples, each by itself, at gates of 1.

    Attributes:
        loss: of each sample's response, in nats, `[batch]`.
        prefill: its derivative by each layer's prefill gate, `[batch, num_hidden_layers]`.
        decode: likewise by the decode gates.
    """

    loss: torch.Tensor
    prefill: torch.Tensor
    decode: torch.Tensor


@dataclass(frozen=True)
class Sequences:
    """Prompts, padded on the left, and responses, padded on the right.

    Attributes:
        input_ids: `[batch, width + longest response]`.
        mask: 1 at real tokens and behind the responses, where nothing looks; 0 in front of the prompts.
        width: of the prompts, in tokens.
        responded: true at the tokens of the responses, `[batch, longest response]`.
    """

    input_ids: torch.Tensor
    mask: torch.Tensor
    width: int
    responded: torch.Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], device: Any = None) -> Sequences:
        """From token ids; the prompts and the responses have one token or more."""
        width, longest = max(map(len, prompts)), max(map(len, responses))
        rows = [
            [0] * (width - len(prompt)) + [*prompt, *response] + [0] * (longest - len(response))
            for prompt, response in zip(prompts, responses, strict=True)
        ]
        starts = torch.tensor([width - len(prompt) for prompt in prompts], device=device)
        lengths = torch.tensor([len(response) for response in responses], device=device)
        input_ids = torch.tensor(rows, device=device)
        mask = (torch.arange(width + longest, device=device) >= starts[:, None]).long()
        return cls(input_ids, mask, width, torch.arange(longest, device=device) < lengths[:, None])

    @property
    def targets(self) -> torch.Tensor:
        """The tokens of the responses, `[batch, longest response]`."""
        return self.input_ids[:, self.width :]

    def inputs(self, model: nn.Module) -> dict[str, torch.Tensor]:
        """The arguments of a forward pass over all tokens but the last of the longest response."""
        mask = self.mask[:, :-1]
        inputs = {"input_ids": self.input_ids[:, :-1], "attention_mask": mask}
        if "position_ids" in inspect.signature(model.forward).parameters:
            inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
        return inputs


def response_losses(model: Any, sequences: Sequences, dtype: torch.dtype) -> torch.Tensor:
    """The loss of each response (Eq. 12), `[batch]`, computed in `dtype`."""
    kept = sequences.targets.shape[1]
    inputs: dict[str, Any] = dict(sequences.inputs(model), use_cache=False)
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        inputs["logits_to_keep"] = kept
    logits = model(**inputs).logits[:, -kept:].to(dtype)
    losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), sequences.targets, reduction="none")
    return torch.where(sequences.responded, losses, 0).sum(-1)


def gate_gradients(gates: VirtualGates, sequences: Sequences) -> GateGradients:
    """The gradients of each sample's loss by its gates (the inside of Eq. 13).

    The memory is that of a forward pass that keeps the input of each layer, and of one layer's backward pass.
    """
    model = gates.decoder.model
    shape = (len(sequences.input_ids), len(gates.decoder.layers))
    device = sequences.input_ids.device
    prefill, decode = (torch.ones(shape, dtype=gates.dtype, device=device, requires_grad=True) for _ in range(2))
    with (
        torch.enable_grad(),
        _frozen(model),
        _recomputed(gates.decoder.layers),
        gates.at(prefill, decode, context=sequences.width - 1),
    ):
        loss = response_losses(model, sequences, gates.dtype)
        by_prefill, by_decode = torch.autograd.grad(loss.sum(), (prefill, decode))
    return GateGradients(loss.detach(), by_prefill, by_decode)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradients of weights inside the block."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


@contextmanager
def _recomputed(layers: Sequence[nn.Module]) -> Iterator[None]:
    """Keep only the input of each layer for the backward pass, which computes the layer once more.

    Transformers' own checkpointing works in training mode only, which would switch dropout on.
    """

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    active = [MethodOverride(layer, "forward", run) for layer in layers]
    try:
        yield
    finally:
        for override in reversed(active):
            override.remove()
