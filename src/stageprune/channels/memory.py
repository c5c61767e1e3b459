"""What one layer remembers of the sequences in a K/V cache: the statistics of their tokens, and what follows from them.

Statistics from generated tokens (`refresh`) can be taken back when their positions are: speculation drops positions
from the cache and generates them anew.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class _Earlier:
    """The statistics before the generated token at `position` was added."""

    position: int
    sums: torch.Tensor | None
    up_sums: torch.Tensor | None
    collected: int


@dataclass
class Memory:
    """See the module's docstring.

    Attributes:
        sums: of squared activations over the tokens that count, `[groups, h]` (of routed experts, see `experts.py`);
            None before the first.
        up_sums: likewise of squared up projections, where the selection goes by them.
        prompted: whether the layer has seen prefill rows.
        seen: which groups had a real token among those rows, `[groups]`; None if all had.
        first: the position of the first decode row after the prompt.
        collected: how many generated tokens were added.
        partition: from the sums, the layer's `Partition`, or those of its experts; None when the sums changed.
        bound: what the backend keeps for the partition.
    """

    sums: torch.Tensor | None = None
    up_sums: torch.Tensor | None = None
    prompted: bool = False
    seen: torch.Tensor | None = None
    first: int = 0
    collected: int = 0
    partition: Any = None
    bound: Any = None
    _earlier: list[_Earlier] = field(default_factory=list)

    def add(self, sums: torch.Tensor, up_sums: torch.Tensor | None) -> None:
        """Statistics of prompt tokens; those of generated tokens before them cannot be taken back any more."""
        self.prompted = True
        self._earlier.clear()
        self._add(sums, up_sums)

    def add_generated(self, position: int, sums: torch.Tensor, up_sums: torch.Tensor | None) -> None:
        """Statistics of the generated token at this position."""
        self._earlier.append(_Earlier(position, self.sums, self.up_sums, self.collected))
        self.collected += 1
        self._add(sums, up_sums)

    def take_back(self, past: int) -> None:
        """Forget generated tokens at `past` and later: they are generated anew."""
        while self._earlier and self._earlier[-1].position >= past:
            earlier = self._earlier.pop()
            self.sums, self.up_sums, self.collected = earlier.sums, earlier.up_sums, earlier.collected
            self.partition = self.bound = None

    def reorder(self, rows: torch.Tensor) -> None:
        """Follow the beams: row i continues what row `rows[i]` was. Before any token was added, beams are equal."""
        if not self._earlier:
            return

        def moved(values: torch.Tensor | None) -> torch.Tensor | None:
            if values is None or len(values) == 1:  # the whole batch shares it
                return values
            return values[rows.to(values.device)]

        self.sums, self.up_sums = moved(self.sums), moved(self.up_sums)
        self._earlier = [
            _Earlier(one.position, moved(one.sums), moved(one.up_sums), one.collected) for one in self._earlier
        ]
        self.partition = self.bound = None

    def _add(self, sums: torch.Tensor, up_sums: torch.Tensor | None) -> None:
        self.sums = sums if self.sums is None else self.sums + sums
        if up_sums is not None:
            self.up_sums = up_sums if self.up_sums is None else self.up_sums + up_sums
        self.partition = self.bound = None
