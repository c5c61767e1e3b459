"""A request as the worker sees it: what to generate, and what it tells about it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from stageprune.serving.transformers.api_error import ApiError

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Row:
    """One answer to generate.

    Attributes:
        prompt: its tokens, at least one.
        max_new_tokens: at least one.
    """

    prompt: Sequence[int]
    max_new_tokens: int


@dataclass(frozen=True)
class Sampling:
    """How the tokens of all answers of a request are chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: sample from the likeliest tokens only, which have this probability together.
        seed: of the first answer; the next ones go on. None: another one each time.
        stop: strings that end an answer, and are not part of it.
        top_logprobs: how many of the likeliest tokens to tell with each token; None: no log-probabilities at all.
    """

    temperature: float = 0
    top_p: float = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None


@dataclass(frozen=True)
class TokenScore:
    """A token with its log-probability, before temperature and top_p; `top`: the likeliest tokens with theirs."""

    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Piece:
    """A bit of an answer.

    Attributes:
        choice: index of the row.
        text: may be empty at the end of an answer.
        count: tokens generated since the last piece, an end-of-sequence token included.
        scores: of the tokens with text, if they were asked for.
        finish: why the answer ends here; None: it does not.
    """

    choice: int
    text: str
    count: int
    scores: tuple[TokenScore, ...] = ()
    finish: FinishReason | None = None


@dataclass(frozen=True)
class End:
    """Nothing follows. `error`: why the request failed; `cancelled`: because nobody waits for it."""

    error: ApiError | None = None
    cancelled: bool = False


class Interrupt(Enum):
    """Why a job shall stop."""

    CANCELLED = "cancelled"
    SHUTDOWN = "shutdown"


class Interrupted(Exception):
    """Raised in the middle of a job that shall stop."""


class Job:
    """What the worker generates for one request.

    Args:
        rows: the answers.
        sampling: how to choose tokens.
        deliver: called by the worker, in its thread, with each piece and then one end; must not block.
    """

    def __init__(self, rows: Sequence[Row], sampling: Sampling, deliver: Callable[[Piece | End], None]) -> None:
        self.rows = rows
        self.sampling = sampling
        self.deliver = deliver
        self.interrupt: Interrupt | None = None
        self.arrived = time.perf_counter()

    def check(self) -> None:
        """Raises Interrupted if the job shall stop."""
        if self.interrupt is not None:
            raise Interrupted
