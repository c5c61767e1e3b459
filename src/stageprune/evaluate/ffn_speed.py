"""Speed of one pruned FFN against the dense one, for shapes of models that need not be there.

A generated token takes the time of reading weights from memory. So several layers with random weights take turns, more
than any cache holds, and dense and pruned passes through all of them alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from stageprune.channels.costs import dense_cost, pruned_cost
from stageprune.channels.kernels.base import Backend, make_layer
from stageprune.channels.kernels.choose import make_backend
from stageprune.channels.partition import Partition, partition, statistics
from stageprune.channels.sizes import Sizes, sizes_of
from stageprune.evaluate.alternation import alternate_turns
from stageprune.evaluate.clock import synchronize
from stageprune.evaluate.spread import Spread
from stageprune.families.ffn import describe_ffn
from stageprune.methods import OnlineChannelPruning

_ALL_BYTES = 512 << 20
"""Weights of all layers together: beyond every cache."""

_PROMPT = 16
"""Random tokens that give a partition."""


@dataclass(frozen=True)
class FFNSpeed:
    """One shape and setting, measured.

    Attributes:
        hidden_size, intermediate_size: of the FFN.
        rows: tokens at once.
        sizes: how many channels are retained, candidates, active.
        backend: what ran the pruned FFN.
        layers: how many took turns.
        dense_s, pruned_s: of one layer, in seconds.
        speedup: per pair of neighbouring passes.
        ideal_speedup: if time went by bytes alone.
        preparation_s: of the partition, and what the backend keeps for it, of one layer, in seconds.
    """

    hidden_size: int
    intermediate_size: int
    rows: int
    sizes: Sizes
    backend: str
    layers: int
    dense_s: Spread
    pruned_s: Spread
    speedup: Spread
    ideal_speedup: float
    preparation_s: Spread

    @property
    def achieved(self) -> float:
        """The share of the ideal speed-up that was measured."""
        return self.speedup.median / self.ideal_speedup

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "achieved": self.achieved}


class _GatedFFN(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))
        return down


class _DecoderLayer(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.mlp = _GatedFFN(hidden_size, intermediate_size)


@torch.inference_mode()
def ffn_speed(
    hidden_size: int,
    intermediate_size: int,
    method: OnlineChannelPruning,
    *,
    dtype: torch.dtype = torch.bfloat16,
    device: str | torch.device = "cpu",
    rows: int = 1,
    pairs: int = 15,
    seconds: float = 0.0,
    on_pass: Callable[[], object] = lambda: None,
) -> FFNSpeed:
    """Measure one shape.

    Args:
        hidden_size, intermediate_size: of a gated FFN without biases.
        method: its `mlp_ratio` (or `ratio`, taken for the MLP ratio) and other settings.
        dtype: of the weights.
        device: where they are.
        rows: sequences at once; they choose as `method.scope` says.
        pairs: of dense and pruned passes, at least.
        seconds: how long to go on, at least.
        on_pass: called after each pass.
    """
    where = torch.device(device)
    sizes = sizes_of(intermediate_size, method.ratio if method.mlp_ratio is None else method.mlp_ratio, method)
    each = 3 * hidden_size * intermediate_size * dtype.itemsize
    with torch.device(where):
        torch.manual_seed(0)
        modules = [
            _DecoderLayer(hidden_size, intermediate_size).to(dtype) for _ in range(max(2, -(-_ALL_BYTES // each)))
        ]
        inputs = torch.randn(rows, 1, hidden_size).to(dtype)
        prompt = torch.randn(rows, _PROMPT, hidden_size).to(dtype)
    layers, preparation = [], []
    for index, module in enumerate(modules):
        layer = make_layer(describe_ffn(index, module), method.selection)
        backend = make_backend(method, layer)
        sums, up_sums = statistics(*layer.ffn.hidden_and_up(prompt), None, method)
        synchronize(where)
        start = time.perf_counter()
        parts = partition(sums, layer.column_norms, sizes, up_sums)
        bound = backend.bind(parts)
        synchronize(where)
        preparation.append(time.perf_counter() - start)
        layers.append((module.mlp, backend, parts, bound))

    def one_pass(dense: bool) -> float:
        synchronize(where)
        start = time.perf_counter()
        for module, backend, parts, bound in layers:
            _run(module, backend, parts, bound, inputs, dense)
        synchronize(where)
        on_pass()
        return (time.perf_counter() - start) / len(layers)

    for dense in (True, False):
        one_pass(dense)
    times = alternate_turns(one_pass, pairs=pairs, seconds=seconds)
    cost = pruned_cost(hidden_size, sizes, method.selection)
    return FFNSpeed(
        hidden_size,
        intermediate_size,
        rows,
        sizes,
        layers[0][1].name,
        len(layers),
        Spread.of([dense for dense, _ in times]),
        Spread.of([pruned for _, pruned in times]),
        Spread.of([dense / pruned for dense, pruned in times]),
        dense_cost(hidden_size, intermediate_size).weights / cost.weights,
        Spread.of(preparation),
    )


def _run(
    module: nn.Module, backend: Backend, parts: Partition, bound: Any, inputs: torch.Tensor, dense: bool
) -> torch.Tensor:
    if dense:
        outputs: torch.Tensor = module(inputs)
        return outputs
    return backend.run(inputs, parts, bound)
