"""Which rows of a step encode context and which decode: `prefill` of `stages.py`, for many requests in a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Rows:
    """The rows of one step, in which each request has some neighbouring ones.

    Attributes:
        context: `[c]`, the rows that encode context, ascending.
        decode: `[d]`, the others: last prompt tokens, generated ones and guesses that are verified.
        requests: `[r]`, the requests that have decode rows.
        starts: `[r + 1]`, where each of these requests begins among the decode rows, and the end.
    """

    context: Counts
    decode: Counts
    requests: Counts
    starts: Counts

    @property
    def longest(self) -> int:
        """The most decode rows that a request has."""
        return int(np.diff(self.starts).max(initial=0))


def split_rows(
    scheduled: npt.ArrayLike, computed: npt.ArrayLike, prompt: npt.ArrayLike, all_context: bool = False
) -> Rows | None:
    """Tell the rows apart by position: a token is context if its prompt goes on behind it.

    The prompt's end is fixed, so a request that is computed again after preemption, with the tokens that it had
    generated, is computed as it was the first time; so is one that arrives in chunks, whatever their sizes.

    Args:
        scheduled: `[requests]`, how many rows each has.
        computed: `[requests]`, how many of its tokens have keys and values already.
        prompt: `[requests]`, the length of its prompt.
        all_context: count the last prompt token as context, too (an instance that only encodes prompts).

    Returns:
        None if no row encodes context.
    """
    scheduled, computed, prompt = (np.asarray(part, dtype=np.int64) for part in (scheduled, computed, prompt))
    leading = np.clip(prompt - (0 if all_context else 1) - computed, 0, scheduled)
    if not leading.any():
        return None
    ends = np.cumsum(scheduled)
    offsets = np.arange(ends[-1]) - np.repeat(ends - scheduled, scheduled)
    context = offsets < np.repeat(leading, scheduled)
    following = scheduled - leading
    requests = np.flatnonzero(following)
    starts = np.concatenate(([0], np.cumsum(following[requests])))
    return Rows(np.flatnonzero(context), np.flatnonzero(~context), requests, starts)
