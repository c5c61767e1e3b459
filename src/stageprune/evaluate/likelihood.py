"""Log-likelihoods of given continuations under a pruned model, in batches of unequal contexts.

Stages are positions: of each row, the context up to its last token is prefill, the rest decode. All rows of a pass
share one boundary between the two, so contexts are padded on the left to end at the same column, and continuations on
the right, where causal attention never looks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageprune.pruning import Handle


@dataclass(frozen=True)
class Request:
    """A continuation to score.

    Attributes:
        context: token ids, one or more.
        continuation: token ids, one or more.
        prefill: how many leading tokens of the context are prefill, less than all of them.
    """

    context: tuple[int, ...]
    continuation: tuple[int, ...]
    prefill: int

    @property
    def inputs(self) -> tuple[int, ...]:
        """What the model reads: the last token is only predicted."""
        return (*self.context, *self.continuation[:-1])


Answer = tuple[float, bool]
"""The log-likelihood in nats, and whether greedy decoding would give this continuation."""


@torch.no_grad()
def log_likelihoods(
    handle: Handle,
    requests: Sequence[Request],
    batch_size: int,
    *,
    dtype: torch.dtype | None = None,
    on_done: Callable[[int], object] = lambda count: None,
) -> list[Answer]:
    """Score continuations.

    Args:
        handle: of the pruned model. Channels must be chosen for each sequence (`scope="sequence"`), else the rows of a
            batch depend on each other.
        requests: in any order.
        batch_size: rows of a pass; those that read the same tokens in the same stages are one row.
        dtype: of the softmax; None for the logits' own.
        on_done: called with the number of answered requests after each pass.

    Returns:
        An answer to each request, in their order.
    """
    same: dict[tuple[tuple[int, ...], int], list[int]] = {}
    for index, request in enumerate(requests):
        same.setdefault((request.inputs, request.prefill), []).append(index)
    rows = sorted(same, key=lambda row: (-row[1], row[1] - len(row[0]), row[0]))
    # A sequence without any prefill is not like one whose prefill is all padding: generated tokens may give it the
    # partition of channels that it lacks.
    parts = [row for row in rows if row[1]], [row for row in rows if not row[1]]
    answers: dict[int, Answer] = {}
    for batch in (part[start : start + batch_size] for part in parts for start in range(0, len(part), batch_size)):
        for row, logits in zip(batch, _decode_logits(handle, batch), strict=True):
            scores = logits.log_softmax(-1, dtype=dtype)
            for index in same[row]:
                answers[index] = _answer(scores, requests[index].continuation)
        on_done(sum(len(same[row]) for row in batch))
    return [answers[index] for index in range(len(requests))]


def _answer(scores: torch.Tensor, continuation: Sequence[int]) -> Answer:
    """Of log-probabilities `[rows, vocab_size]` whose last row predicts the last token."""
    scores = scores[-len(continuation) :]
    tokens = torch.tensor(continuation, device=scores.device)
    greedy = bool((scores.argmax(-1) == tokens).all())
    return float(scores.gather(-1, tokens[:, None]).sum()), greedy


def _decode_logits(handle: Handle, rows: Sequence[tuple[tuple[int, ...], int]]) -> Iterator[torch.Tensor]:
    """The logits of each row's decode positions, `[decode positions, vocab_size]`."""
    model: Any = handle.model
    device = model.get_input_embeddings().weight.device
    prefill = max(count for _, count in rows)
    decode = max(len(tokens) - count for tokens, count in rows)
    ids = torch.zeros((len(rows), prefill + decode), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (tokens, count) in enumerate(rows):
        place = slice(prefill - count, prefill - count + len(tokens))
        ids[row, place], mask[row, place] = torch.tensor(tokens), 1
    arguments = {"input_ids": ids.to(device)}
    if not bool(mask[:, 0].all()):
        arguments["attention_mask"] = mask.to(device)
        if "position_ids" in inspect.signature(type(model).forward).parameters:
            arguments["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0).to(device)
    with handle.stage(prefill=prefill):
        logits = model(**arguments, logits_to_keep=decode, use_cache=False).logits
    for row, (tokens, count) in enumerate(rows):
        yield logits[row, : len(tokens) - count]
