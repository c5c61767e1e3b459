"""Every backend in every type: the same choices and, up to one rounding, the same outputs.

All weights and inputs are small integers, so that activations, scores and sums are exact in each type: a choice that
differs is wrong, not rounded.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stageprune as sp
from reference import channel_ffn as ref
from stageprune.channels.kernels.base import Layer
from stageprune.channels.kernels.choose import make_backend
from stageprune.channels.partition import partition, squares
from stageprune.channels.sizes import sizes_of
from stageprune.families.ffn import describe_ffn

WIDTH = 16
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}


class FFN(nn.Module):
    """`down(relu(gate(x)) * up(x))`, or without a gate `down(relu(up(x)))`."""

    def __init__(self, channels: int, gated: bool, generator: torch.Generator) -> None:
        super().__init__()
        self.act_fn = nn.ReLU()
        for name in ("gate_proj", "up_proj") if gated else ("up_proj",):
            linear = nn.Linear(WIDTH, channels, bias=False)
            linear.weight.data = rows(channels, 4, generator)  # all of the same norm, so that equal scores stay equal
            setattr(self, name, linear)
        self.down_proj = nn.Linear(channels, WIDTH, bias=False)
        self.down_proj.weight.data = rows(channels, 1, generator).T.contiguous()
        self.gated = gated

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return self.down_proj(self.act_fn(self.up_proj(x)))


def rows(count: int, filled: int, generator: torch.Generator) -> torch.Tensor:
    """Rows with this many entries of 1 or -1."""
    places = torch.rand(count, WIDTH, generator=generator).argsort(1)[:, :filled]
    signs = torch.randint(0, 2, (count, filled), generator=generator) * 2.0 - 1
    return torch.zeros(count, WIDTH).scatter_(1, places, signs)


@settings(max_examples=150)
@given(data=st.data())
@torch.no_grad()
def test_all_types_choose_alike(data) -> None:
    channels = data.draw(st.integers(1, 40), "h")
    gated = data.draw(st.booleans(), "gated")
    selection = data.draw(st.sampled_from(["partition", "fixed", "full", *(["gate"] if gated else [])]), "selection")
    backends = ["masked", "indexed", *(["sliced"] if selection in ("partition", "fixed") else [])]
    method = sp.OnlineChannelPruning(
        mlp_ratio=data.draw(st.floats(0, 0.95), "r"),
        partition_fraction=data.draw(st.floats(0, 1), "gamma"),
        selection=selection,
        scope=data.draw(st.sampled_from(["batch", "sequence"]), "scope"),
        backend=data.draw(st.sampled_from(backends), "backend"),
    )
    dtype = DTYPES[data.draw(st.sampled_from(list(DTYPES)), "dtype")]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    batch, length = data.draw(st.integers(1, 3), "batch"), data.draw(st.integers(1, 3), "rows")
    module = FFN(channels, gated, generator)
    prompt = torch.randint(-2, 3, (batch, 7, WIDTH), generator=generator).float()
    x = torch.randint(-2, 3, (batch, length, WIDTH), generator=generator).float()
    gate = module.gate_proj.weight.double() if gated else None
    ffn = ref.Weights(
        gate, None, module.up_proj.weight.double(), None, module.down_proj.weight.double(), None, torch.relu
    )
    groups = [list(range(batch))] if method.scope == "batch" else [[row] for row in range(batch)]
    sizes = ref.sizes(channels, method.mlp_ratio or 0, method.delta)
    expected = torch.empty(batch, length, WIDTH, dtype=torch.float64)
    for group in groups:
        sums = ref.no_rows(ffn)
        for row in group:
            sums = ref.add_rows(ffn, sums, prompt[row].double())
        parts = ref.partition(ffn, sums, sizes)
        for t in range(length):
            expected[group, t] = ref.decode_step(ffn, x[group, t].double(), parts, selection)

    layer = nn.Module()
    layer.mlp = module.to(dtype)
    described = describe_ffn(0, layer)
    norms = torch.linalg.vector_norm(module.down_proj.weight, dim=0, dtype=torch.promote_types(dtype, torch.float32))
    up_norms = torch.full_like(norms, 2.0) if selection == "gate" else None
    try:
        backend = make_backend(method, Layer(described, norms, up_norms, selection))
    except sp.UnsupportedModelError as error:
        pytest.skip(str(error))  # no compiler
    ours_sums = squares(described.hidden(prompt.to(dtype)), None)
    if method.scope == "batch":
        ours_sums = ours_sums.sum(0, keepdim=True)
    ours_parts = partition(ours_sums, norms, sizes_of(channels, method.mlp_ratio or 0, method))
    ours = backend.run(x.to(dtype), ours_parts, backend.bind(ours_parts))
    assert ours.dtype == dtype
    assert torch.equal(ours, expected.to(dtype))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_statistics_of_very_long_prompts_neither_overflow_nor_stall(dtype: str) -> None:
    """100,000 tokens of fp16's largest value; and of values whose squares would vanish in a 16-bit sum."""
    of = DTYPES[dtype]
    large = torch.full((1, 1, 2), 65_000.0).to(of).expand(1, 100_000, 2)
    small = torch.full((1, 1, 2), 1e-3).to(of).expand(1, 100_000, 2)
    for values in (large, small):
        sums = squares(values, None)
        assert sums.dtype == torch.float32
        exact = 100_000 * values[0, 0].double() ** 2
        assert torch.allclose(sums[0].double(), exact, rtol=1e-4)
        halves = squares(values[:, :60_000], None) + squares(values[:, 60_000:], None)
        assert torch.allclose(halves, sums, rtol=1e-4)
