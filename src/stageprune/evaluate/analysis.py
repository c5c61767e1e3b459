"""Scoring the layers of a model over calibration prompts, a batch at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from stageprune.errors import NumericsError
from stageprune.evaluate.drift import measure_drift
from stageprune.prefill.fisher import Sequences, gate_gradients
from stageprune.prefill.gates import VirtualGates
from stageprune.prefill.importance import SampleScore
from stageprune.prefill.responses import sample_responses


def analyze(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    response_tokens: int,
    seed: int,
    batch: int,
    skipped: tuple[int, ...],
    done: Sequence[SampleScore] = (),
    on_batch: Callable[[tuple[SampleScore, ...]], object] = lambda scores: None,
) -> tuple[SampleScore, ...]:
    """Score every layer in every stage on each prompt (arXiv 2602.03295, Eq. 13), and measure the drift of Figure 2.

    Args:
        model: not pruned; it is left unchanged.
        prompts: token ids, two or more each.
        response_tokens: the length at most of the response that is sampled for each prompt.
        seed: of the responses.
        batch: samples at a time. Results depend on it by rounding only.
        skipped: the layers that the pruned model of the drift skips in prefill.
        done: scores of the first prompts from an earlier run with the same arguments: whole batches.
        on_batch: called after each batch with all scores so far.

    Raises:
        UnsupportedModelError: if the model's branches cannot be gated.
        NumericsError: if a gradient is not finite.
    """
    scores = tuple(done)
    with VirtualGates(model) as gates:
        for start in range(len(scores), len(prompts), batch):
            indices = range(start, min(start + batch, len(prompts)))
            scores += _score(gates, [prompts[index] for index in indices], indices, response_tokens, seed, skipped)
            on_batch(scores)
    return scores


def _score(
    gates: VirtualGates,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    response_tokens: int,
    seed: int,
    skipped: tuple[int, ...],
) -> tuple[SampleScore, ...]:
    model: Any = gates.decoder.model
    responses = sample_responses(model, prompts, indices, seed, response_tokens)
    sequences = Sequences.of(prompts, responses, model.device)
    gradients = gate_gradients(gates, sequences)
    drifts = measure_drift(gates, sequences, skipped)
    columns = zip(
        indices,
        map(len, prompts),
        map(len, responses),
        gradients.loss.tolist(),
        gradients.prefill.tolist(),
        gradients.decode.tolist(),
        drifts,
        strict=True,
    )
    return tuple(
        _checked(SampleScore(index, prompt, response, loss, tuple(prefill), tuple(decode), drift))
        for index, prompt, response, loss, prefill, decode, drift in columns
    )


def _checked(score: SampleScore) -> SampleScore:
    numbers = (score.loss, *score.prefill, *score.decode)
    numbers += (*score.drift.hidden_states, *score.drift.keys, *score.drift.values, *score.drift.attention)
    if not all(map(math.isfinite, numbers)):
        raise NumericsError(
            f"the gradients of sample {score.index} are not finite: an overflow, usual with float16; "
            "load the model in bfloat16 or float32"
        )
    return score
