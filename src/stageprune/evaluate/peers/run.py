"""Peers over the lengths and batch sizes of a grid."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stageprune.evaluate.grid import Grid
from stageprune.evaluate.peers.base import PeerError, PeerSpeed, closing, peer_speed
from stageprune.evaluate.peers.choose import open_peer
from stageprune.evaluate.text import prompt_of


@dataclass(frozen=True)
class PeerResult:
    """One peer.

    Attributes:
        peer: its name.
        cells: what was measured, for each batch size and length.
        missing: why there is no more; None if all was measured.
    """

    peer: str
    cells: tuple[PeerSpeed, ...]
    missing: str | None

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {"peer": self.peer, "missing": self.missing, "cells": [cell.to_dict() for cell in self.cells]}


def run_peers(
    names: Sequence[str],
    model: Any,
    tokenizer: Any,
    source: str,
    grid: Grid,
    on_turn: Callable[[], object] = lambda: None,
) -> Iterator[PeerResult]:
    """Measure each peer on the grid's prompts; one that cannot run here says why, and the others go on.

    Args:
        names: of `stageprune.evaluate.peers.NAMES`.
        model: not pruned.
        tokenizer: of the model.
        source: what the model was loaded from.
        grid: lengths, batch sizes and numbers of turns.
        on_turn: called after each turn.
    """
    for name in names:
        cells: list[PeerSpeed] = []
        missing = None
        try:
            with closing(open_peer(name, model, source, max(grid.lengths) + grid.new_tokens)) as peer:
                for batch in grid.batches:
                    for length in grid.lengths:
                        rows = [prompt_of(tokenizer, length, start=row * length) for row in range(batch)]
                        ids = torch.tensor(rows, device=model.device)
                        tokens, pairs, seconds = grid.new_tokens, grid.pairs, grid.seconds
                        cells.append(
                            peer_speed(model, peer, ids, tokens, pairs=pairs, seconds=seconds, on_turn=on_turn)
                        )
        except PeerError as error:
            missing = str(error)
        yield PeerResult(name, tuple(cells), missing)
