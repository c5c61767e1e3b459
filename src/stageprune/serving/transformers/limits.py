"""What one request may ask for, and how long things may take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The server's limits.

    Attributes:
        max_model_len: prompt and answer together, in tokens.
        max_new_tokens: of one answer; None: what the prompt leaves of `max_model_len`.
        max_queue: requests that wait while one runs; a further one is refused with 429.
        max_answers: of one request, prompts times `n`. They are generated one after the other.
        max_body: of a request, in bytes.
        body_s: how long a client may take to send its body, in seconds.
        grace_s: how long a running request may go on after a signal to stop, in seconds.
    """

    max_model_len: int
    max_new_tokens: int | None = None
    max_queue: int = 64
    max_answers: int = 16
    max_body: int = 4 << 20
    body_s: float = 30
    grace_s: float = 5
