"""Channel pruning of an image encoder (arXiv 2602.06822, Appendix B), written out: one channel after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def pruned_ffn(mlp: Any, hidden_states: torch.Tensor, kept: int, together: bool) -> torch.Tensor:
    """The FFN of `[batch, rows, columns, hidden_size]` with the `kept` best channels by its own activations.

    Args:
        mlp: with `lin1`, `act` and `lin2`.
        hidden_states: its input.
        kept: how many channels.
        together: whether the images of the batch share one choice.
    """
    hidden = mlp.act(hidden_states @ mlp.lin1.weight.T + mlp.lin1.bias)
    outputs = mlp.lin2.bias.expand(*hidden.shape[:-1], -1).clone()
    for images in [list(range(len(hidden)))] if together else [[image] for image in range(len(hidden))]:
        scores = []
        for channel in range(hidden.shape[-1]):
            activation = sum(float((hidden[image, ..., channel] ** 2).sum()) for image in images) ** 0.5
            scores.append(float((mlp.lin2.weight[:, channel] ** 2).sum()) ** 0.5 * activation)
        best = sorted(range(len(scores)), key=lambda channel: -scores[channel])[:kept]
        for image in images:
            for channel in best:
                outputs[image] += hidden[image, ..., channel, None] * mlp.lin2.weight[:, channel]
    return outputs


@contextmanager
def pruned(layers: Any, kept: dict[int, int], together: bool) -> Iterator[None]:
    """Inside the block the FFNs of these layers are the reference's."""
    for index, count in kept.items():
        mlp = layers[index].mlp
        mlp.forward = lambda x, mlp=mlp, count=count: pruned_ffn(mlp, x, count, together)
    try:
        yield
    finally:
        for index in kept:
            del layers[index].mlp.forward
