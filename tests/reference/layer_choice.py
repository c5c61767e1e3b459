"""Choosing layers by trying every choice: by importance (arXiv 2602.03295, Eq. 13), and by measured quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import chain, combinations, pairwise
from typing import Any

import torch

from reference.prefill_oracle import gated_logits, layers_of


def least_important(scores: Sequence[float], count: int, contiguous: bool) -> tuple[int, ...]:
    """Of all sets of `count` layers (neighbours only, or any) the one with the least sum; among equals the deepest."""
    sets = [
        layers
        for layers in combinations(range(len(scores)), count)
        if not contiguous or all(b == a + 1 for a, b in pairwise(layers))
    ]
    return min(sets, key=lambda layers: (sum(Fraction(scores[layer]) for layer in layers), [-i for i in layers]))


def every_set(count: int) -> list[tuple[int, ...]]:
    """All sets of layers."""
    return list(chain.from_iterable(combinations(range(count), size) for size in range(count + 1)))


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], new_tokens: int) -> torch.Tensor:
    """A prompt and the likeliest answer to it, token ids `[1, N + new_tokens]`, by plain forwards."""
    tokens = torch.tensor([list(prompt)])
    for _ in range(new_tokens):
        tokens = torch.cat((tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)), dim=1)
    return tokens


@torch.no_grad()
def quality(
    model: Any, answered: Sequence[torch.Tensor], new_tokens: int, sets: Sequence[tuple[int, ...]]
) -> dict[tuple[int, ...], tuple[float, float]]:
    """For each set of skipped layers: KL divergence from the dense model per answer token, and agreement.

    Dense and pruned predictions come from plain forwards over whole sequences, the pruned ones with gates.

    Args:
        model: untouched.
        answered: prompts with their answers, from `greedy`.
        new_tokens: length of the answers.
        sets: of layers to skip.
    """

    def predicted(tokens: torch.Tensor, skipped: tuple[int, ...]) -> torch.distributions.Categorical:
        first = tokens.shape[1] - new_tokens - 1
        logits = gated_logits(model, skipped, first, input_ids=tokens[:, :-1])
        return torch.distributions.Categorical(logits=logits[0, first:])

    dense = [predicted(tokens, ()) for tokens in answered]
    measured = {}
    for layers in sets:
        pruned = [predicted(tokens, layers) for tokens in answered]
        pairs = list(zip(dense, pruned, strict=True))
        kl = torch.cat([torch.distributions.kl_divergence(one, other) for one, other in pairs])
        same = torch.cat([one.logits.argmax(-1) == other.logits.argmax(-1) for one, other in pairs])
        measured[layers] = kl.mean().item(), same.double().mean().item()
    return measured


def best_set(
    model: Any, measured: dict[tuple[int, ...], tuple[float, float]], within: Callable[[float, float], bool]
) -> tuple[int, ...]:
    """The set within the bound that leaves the fewest layers for prompt positions to run; among equals the closest.

    For models whose layers all cost the same. The last layer's prompt positions feed nothing, so as soon as any layer
    is skipped they need not run in the last one either.
    """
    last = len(layers_of(model)) - 1

    def runs(layers: tuple[int, ...]) -> int:
        return last + 1 - len({*layers, last}) if layers else last + 1

    fitting = [layers for layers, (kl, agreement) in measured.items() if within(kl, agreement)]
    return min(fitting, key=lambda layers: (runs(layers), measured[layers][0]))
