"""Responses sampled from the model itself: the labels of the importance scores (arXiv 2602.03295, section 1.2).

The identities behind the scores (Eq. 7, 8) hold for the model's own distribution only: temperature 1, every token
possible, no penalties; whatever the model's `generation_config` asks for is set aside.

Each sample has a random generator of its own, and the next token is the maximum of the logits plus Gumbel noise, which
is an exact sample of the softmax. So a response depends on the seed and the sample, not on the batch around it (but
for rounding: a batch computes logits in another order).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

from stageprune.prefill.fisher import Sequences


@torch.no_grad()
def sample_responses(
    model: Any, prompts: Sequence[Sequence[int]], indices: Sequence[int], seed: int, max_tokens: int
) -> list[list[int]]:
    """One response to each prompt.

    Args:
        model: not pruned.
        prompts: token ids, of one token or more each.
        indices: which sample each prompt is; with the seed it determines the randomness.
        seed: any non-negative integer.
        max_tokens: after which a response is cut off; the end-of-sequence token ends it before, and is part of it.

    Returns:
        Token ids of each response, one or more.
    """
    batch = Sequences.of(prompts, [[0]] * len(prompts), model.device)
    ids, mask = batch.input_ids[:, :-1], batch.mask[:, :-1]
    ends = end_tokens(model)
    noise = _GumbelNoise([_generator(seed, index) for index in indices])
    with plain_generation(model, ends):
        tokens = model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=max_tokens,
            logits_processor=LogitsProcessorList([noise]),
        )
    return [_until_end(row, ends) for row in tokens[:, ids.shape[1] :].tolist()]


def end_tokens(model: Any) -> tuple[int, ...]:
    """The tokens that end a response."""
    ends = model.generation_config.eos_token_id
    if ends is None:
        return ()
    return (ends,) if isinstance(ends, int) else tuple(ends)


class _GumbelNoise(LogitsProcessor):
    """Turns the greedy choice into a sample: argmax(logits + Gumbel noise) is distributed as softmax(logits)."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The noise of one step; `[batch, vocab_size]`."""
        waits = torch.empty(scores.shape, dtype=torch.float64)
        for row, generator in zip(waits, self._generators, strict=True):
            row.exponential_(generator=generator)
        return scores.double() - waits.log().to(scores.device)


def _generator(seed: int, index: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {index}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


@contextmanager
def plain_generation(model: Any, ends: tuple[int, ...]) -> Iterator[None]:
    """Generation without any of the model's defaults: `generate` fills in what a call leaves open from there."""
    original = model.generation_config
    model.generation_config = GenerationConfig(
        eos_token_id=list(ends) or None, pad_token_id=ends[0] if ends else 0, bos_token_id=original.bos_token_id
    )
    try:
        yield
    finally:
        model.generation_config = original


def _until_end(tokens: list[int], ends: tuple[int, ...]) -> list[int]:
    length = next((place + 1 for place, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[:length]
