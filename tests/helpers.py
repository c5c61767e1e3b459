"""What several test files need."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from packaging.version import Version
from torch.overrides import TorchFunctionMode

from reference.prefill_oracle import layers_of
from stageprune.overrides import MethodOverride
from zoo import VOCAB

RENAMED = Version(transformers.__version__) >= Version("5.24")
CACHE = "cache" if RENAMED else "past_key_values"
"""What generate() and forward() of the installed transformers call the K/V cache."""


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids without the padding token."""
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def left_padded(lengths: list[int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts of these lengths as one batch: ids and attention mask."""
    longest = max(lengths)
    ids = tokens(len(lengths), longest, seed)
    mask = (torch.arange(longest)[None] >= longest - torch.tensor(lengths)[:, None]).long()
    return ids * mask, mask


@contextmanager
def exact_logits(model: Any) -> Iterator[list[torch.Tensor]]:
    """Collect the last logits of every forward in the weights' dtype; generate() itself returns float32."""
    collected: list[torch.Tensor] = []

    def hook(module: Any, args: Any, output: Any) -> None:
        if output.logits.shape[1]:
            collected.append(output.logits[:, -1].clone())

    handle = model.register_forward_hook(hook)
    try:
        yield collected
    finally:
        handle.remove()


def generate(model: Any, input_ids: torch.Tensor, new_tokens: int, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy sequences, and the logits of each step, `[batch, new_tokens, vocabulary]`."""
    options = dict(do_sample=False, max_new_tokens=new_tokens) | options
    with exact_logits(model) as logits:
        sequences = model.generate(input_ids, **options)
    return sequences, torch.stack(logits[-new_tokens:], dim=1)


def close(ours: torch.Tensor, reference: torch.Tensor) -> float:
    """The largest difference, relative to the largest reference value."""
    assert ours.shape == reference.shape, (ours.shape, reference.shape)
    return ((ours.double() - reference.double()).abs().max() / reference.double().abs().max()).item()


def surface(model: Any) -> dict[str, Any]:
    """Everything pruning could leave behind on a model: instance attributes, hooks, forward methods."""
    gc.collect()
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        attributes = {key for key in vars(module) if not key.startswith("_")}
        hooks = {key: len(value) for key, value in vars(module).items() if key.endswith("hooks")}
        found[name] = (attributes, hooks, vars(module).get("forward"), vars(module).get("generate"))
    return found


class InFloat64(TorchFunctionMode):
    """Where transformers computes in float32 whatever the weights' dtype (norms, softmax, rotary angles, generate()'s
    logits), compute in float64: so that two orders of the same operations agree to 1e-10 or are wrong.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {key: torch.float64 if arg is torch.float32 else arg for key, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def in_float64(model: Any) -> Iterator[Any]:
    """`InFloat64` that also holds while a backward pass computes a layer once more."""

    def run(forward: Any, *args: Any, **kwargs: Any) -> Any:
        with InFloat64():
            return forward(*args, **kwargs)

    active = [MethodOverride(layer, "forward", run) for layer in layers_of(model)]
    try:
        with InFloat64():
            yield model
    finally:
        for override in active:
            override.remove()


def three_beams(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Three new tokens by beam search: all sequences `[batch, 3, length + 3]`, and their scores `[batch, 3]`."""
    out = model.generate(
        **inputs,
        num_beams=3,
        num_return_sequences=3,
        max_new_tokens=3,
        do_sample=False,
        length_penalty=0.0,
        output_scores=True,
        return_dict_in_generate=True,
    )
    batch = len(inputs["input_ids"])
    return out.sequences.view(batch, 3, -1), out.sequences_scores.view(batch, 3)


def log_probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """Of tokens `[batch, n]` under logits `[batch, n, vocabulary]`, summed over them."""
    return torch.log_softmax(logits, -1).gather(-1, tokens[..., None])[..., 0].sum(-1)
