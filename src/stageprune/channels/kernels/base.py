"""What a backend is given and what it returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch

from stageprune.channels.partition import Partition
from stageprune.families.ffn import FFN
from stageprune.methods.online_channels import Selection


@dataclass(frozen=True)
class Layer:
    """One FFN and what its channels weigh.

    Attributes:
        ffn: the module, taken apart.
        column_norms: `||W_down[:, i]||`, `[h]`, float32 or better.
        up_norms: `||W_up[i]||`, `[h]`; None unless the selection needs them.
        selection: how a token's channels are chosen.
    """

    ffn: FFN
    column_norms: torch.Tensor
    up_norms: torch.Tensor | None
    selection: Selection


def make_layer(ffn: FFN, selection: Selection) -> Layer:
    """The layer, with the norms that the selection needs."""
    return Layer(ffn, norms(ffn.down.weight, 0), norms(ffn.up.weight, 1) if selection == "gate" else None, selection)


def norms(weight: torch.Tensor, dim: int) -> torch.Tensor:
    """L2 norms along one axis, in float32 or better."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    norms: torch.Tensor = torch.linalg.vector_norm(weight.detach(), dim=dim, dtype=dtype)
    return norms


class Backend(Protocol):
    """Runs the FFN of decode rows with only some channels."""

    name: ClassVar[str]

    @property
    def weight_bytes(self) -> int:
        """Memory that it adds to the weights, for as long as the model is pruned."""
        ...

    def bind(self, partition: Partition) -> Any:
        """What it keeps for a prompt, such as copies of weight rows; freed with the K/V cache."""
        ...

    def bound_bytes(self, bound: Any) -> int:
        """Memory of what `bind` returned."""
        ...

    def run(self, inputs: torch.Tensor, partition: Partition, bound: Any) -> torch.Tensor:
        """The FFN's output, `[batch, rows, hidden_size]`.

        Args:
            inputs: `[batch, rows, hidden_size]`; every row is a decode position with its own choice.
            partition: of one group (shared by the batch) or of `batch` groups.
            bound: what `bind` returned for it.
        """
        ...
