"""A peer, and its turns with the dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stageprune.errors import StagePruneError
from stageprune.evaluate.alternation import alternate_turns
from stageprune.evaluate.clock import timed_generate
from stageprune.evaluate.spread import Spread


class PeerError(StagePruneError):
    """A peer cannot run here: it is not installed, or cannot load this model; the message says which and why."""


@dataclass(frozen=True)
class Times:
    """Of one answer, in seconds: until the first token, and until the last."""

    first_s: float
    total_s: float


class Peer(Protocol):
    """Answers prompts greedily, always with as many tokens as it is asked for.

    Attributes:
        name: such as `"vllm"`.
        precision: of its weights.
        version: of the library.
    """

    name: str
    precision: str
    version: str

    def answer(self, input_ids: torch.Tensor, new_tokens: int) -> Times:
        """Answer the prompts `[batch, length]`.

        Raises:
            PeerError: if it cannot.
        """

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True)
class PeerSpeed:
    """A peer against the dense model in plain transformers.

    Attributes:
        peer, precision, version: which.
        batch, prompt_length, new_tokens: of the answers.
        pairs: of turns.
        dense_first_s, first_s: until the first token, in seconds.
        dense_total_s, total_s: until the last one.
        first_speedup, total_speedup: dense over peer, per pair of turns.
    """

    peer: str
    precision: str
    version: str
    batch: int
    prompt_length: int
    new_tokens: int
    pairs: int
    dense_first_s: Spread
    first_s: Spread
    dense_total_s: Spread
    total_s: Spread
    first_speedup: Spread
    total_speedup: Spread

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over the time of the whole answer, of all rows together."""
        return self.batch * self.new_tokens / self.total_s.median

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        data = {name: value.to_dict() if isinstance(value, Spread) else value for name, value in vars(self).items()}
        return {**data, "tokens_per_s": self.tokens_per_s}


def peer_speed(
    model: Any,
    peer: Peer,
    input_ids: torch.Tensor,
    new_tokens: int,
    *,
    pairs: int,
    seconds: float = 0.0,
    on_turn: Callable[[], object] = lambda: None,
) -> PeerSpeed:
    """The dense model and a peer in alternation, on the same prompts; one turn of each before does not count.

    Args:
        model: dense.
        peer: whose turns they are.
        input_ids: the prompts, `[batch, length]`.
        new_tokens: of each answer.
        pairs, seconds: how many; see `alternate_turns`.
        on_turn: called after each turn.

    Raises:
        PeerError: if the peer cannot answer.
    """

    def turn(dense: bool) -> Times:
        if dense:
            answer = timed_generate(model, input_ids, new_tokens, stop_early=False)
            times = Times(answer.first_token_s, answer.total_s)
        else:
            times = peer.answer(input_ids, new_tokens)
        on_turn()
        return times

    for dense in (True, False):
        turn(dense)
    turns = alternate_turns(turn, pairs=pairs, seconds=seconds)
    batch, length = input_ids.shape
    return PeerSpeed(
        peer.name,
        peer.precision,
        peer.version,
        batch,
        length,
        new_tokens,
        len(turns),
        Spread.of([dense.first_s for dense, _ in turns]),
        Spread.of([other.first_s for _, other in turns]),
        Spread.of([dense.total_s for dense, _ in turns]),
        Spread.of([other.total_s for _, other in turns]),
        Spread.of([dense.first_s / other.first_s for dense, other in turns]),
        Spread.of([dense.total_s / other.total_s for dense, other in turns]),
    )


@contextmanager
def closing(peer: Peer) -> Iterator[Peer]:
    """Close it in the end."""
    try:
        yield peer
    finally:
        peer.close()
