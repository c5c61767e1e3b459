"""Dense and pruned turns in alternation, so that a machine that slows down or is shared slows both."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

Turn = TypeVar("Turn")


def alternate_turns(
    turn: Callable[[bool], Turn], *, pairs: int, seconds: float = 0.0, patience: float = math.inf
) -> list[tuple[Turn, Turn]]:
    """Pairs of a dense and a pruned turn, one right after the other; which goes first alternates, too.

    Args:
        turn: runs one, dense if true, and returns what it measured.
        pairs: how many pairs of turns, at least.
        seconds: how long to go on, at least: short turns need many pairs for a steady median. No more than ten
            times `pairs` are run.
        patience: in seconds; when it is used up, three pairs are enough.
    """
    start = time.perf_counter()
    results: list[tuple[Turn, Turn]] = []
    while True:
        spent = time.perf_counter() - start
        enough = min(pairs, 3) if spent > patience else pairs if spent > seconds else 10 * pairs
        if len(results) >= enough:
            return results
        order = (True, False) if len(results) % 2 == 0 else (False, True)
        turns = {dense: turn(dense) for dense in order}
        results.append((turns[True], turns[False]))
