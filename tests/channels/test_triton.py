"""The GPU's kernels against the CPU's and the slow reference: in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import stageprune as sp
from helpers import InFloat64, close, left_padded
from reference import channel_ffn as ref
from stageprune.channels.kernels import engine, indexed
from stageprune.channels.kernels.native import load_native
from zoo import BY_NAME

pytest.importorskip("triton", reason="Triton is not installed")
from stageprune.channels.kernels.triton_ffn import ffn_decode

# numpy's, in the interpreter: infinity and NaN are meant.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}
SELECTIONS = ("partition", "fixed", "full", "gate", "cascade")
KINDS = ("gated", "gated-bias", "ungated", "ungated-bias")
CHANNELS, WIDTH = 37, 29
SIZES = ref.Sizes(retained=11, candidates=15, pruned=11, active=19)
UPS = 23  # halfway between the active ones and those that are not pruned


@dataclass(frozen=True)
class Case:
    """One FFN of the reference, and what is pruned of it."""

    ffn: ref.Weights
    parts: ref.Partition
    selection: str
    act: str

    def arguments(self, x: torch.Tensor, shared: bool, dtype: torch.dtype = torch.float64) -> list[Any]:
        """Of `ffn_decode`."""
        ffn, parts = self.ffn, self.parts
        sum_type = torch.promote_types(dtype, torch.float32)
        computed = sorted(parts.retained + parts.candidates)
        lists: tuple[Any, Any, int] = {
            "partition": (computed, [computed.index(c) for c in parts.candidates], SIZES.picked),
            "fixed": (sorted(parts.order[: parts.active]), None, 0),
            "full": (None, range(ffn.channels), SIZES.active),
            "gate": (computed, range(len(computed)), SIZES.active),
            "cascade": (computed, range(len(computed)), UPS),
        }[self.selection]
        weights = (ffn.gate, ffn.up, ffn.down.T.contiguous(), ffn.gate_bias, ffn.up_bias, ffn.down_bias)
        up_norms = {"gate": ffn.up.norm(dim=1), "cascade": torch.tensor(parts.up_sizes, dtype=torch.float64)}.get(
            self.selection
        )
        return [
            x.to(dtype),
            *(None if weight is None else weight.to(dtype) for weight in weights),
            *(None if listed is None else torch.tensor(list(listed), dtype=torch.int32) for listed in lists[:2]),
            lists[2],
            ref.column_norms(ffn).to(sum_type),
            None if up_norms is None else up_norms.to(sum_type),
            self.act,
            shared,
            SIZES.active if self.selection == "cascade" else None,
        ]


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def case(selection: str = "partition", kind: str = "gated-bias", act: str = "silu") -> Case:
    gated, bias = kind.startswith("gated"), kind.endswith("bias")
    ffn = ref.Weights(
        random(CHANNELS, WIDTH, seed=1) if gated else None,
        random(CHANNELS, seed=2) if gated and bias else None,
        random(CHANNELS, WIDTH, seed=3),
        random(CHANNELS, seed=4) if bias else None,
        random(WIDTH, CHANNELS, seed=5),
        random(WIDTH, seed=6) if bias else None,
        ACTIVATIONS[act],
    )
    prompt, none = random(9, WIDTH, seed=7), ref.no_rows(ffn)
    parts = ref.partition(ffn, ref.add_rows(ffn, none, prompt), SIZES, ref.add_up_rows(ffn, none, prompt))
    return Case(ffn, parts, selection, act)


def on_triton(arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    moved = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in arguments]
    outputs, picked = ffn_decode(*moved)
    return outputs.cpu(), picked.cpu()


def on_cpu(arguments: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    obstacle = load_native()
    if obstacle:
        pytest.skip(obstacle)
    outputs, picked = torch.ops.stageprune.ffn_decode(*arguments)
    return outputs, picked


def assert_same_choice(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.dtype == theirs.dtype == torch.int32
    assert ours.tolist() == theirs.tolist()


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("selection", "kind"),
    [
        (selection, kind)
        for selection in SELECTIONS
        for kind in KINDS
        if selection not in ("gate", "cascade") or kind[:2] != "un"
    ],
)
def test_float64_equals_the_reference(selection: str, kind: str) -> None:
    one = case(selection, kind)
    for rows, shared in ((1, False), (3, False), (3, True)):
        x = random(rows, WIDTH, seed=rows)
        groups = [x] if shared else list(x.split(1))
        outputs, picked = on_triton(one.arguments(x, shared))
        expected = torch.cat([ref.decode_step(one.ffn, group, one.parts, selection) for group in groups])
        assert close(outputs, expected) < 1e-10, (rows, shared)
        for row, group in enumerate(groups):
            chosen = ref.chosen(one.ffn, group, one.parts, selection)
            if selection == "partition":
                chosen = [channel for channel in chosen if channel in one.parts.candidates]
            assert picked[row].tolist() == ([] if selection == "fixed" else chosen)


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_float64_activations(act: str) -> None:
    one, x = case("fixed", "ungated-bias", act), random(3, WIDTH, seed=0)
    outputs, _ = on_triton(one.arguments(x, False))
    assert close(outputs, ref.decode_step(one.ffn, x, one.parts, "fixed")) < 1e-10


@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_float32_equals_the_cpu(selection: str, act: str) -> None:
    one = case(selection, act=act)
    for rows, shared in ((1, False), (1, True), (8, False), (8, True)):
        arguments = one.arguments(random(rows, WIDTH, seed=rows), shared, torch.float32)
        (ours, our_choice), (theirs, their_choice) = on_triton(arguments), on_cpu(arguments)
        assert ours.dtype == torch.float32
        assert close(ours, theirs) < 1e-5, (rows, shared)
        assert_same_choice(our_choice, their_choice)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_low_precision_is_rounded_once(selection: str, dtype: str) -> None:
    """Only the output is rounded, as on the CPU. By one unit in the last place: the interpreter cuts off bfloat16."""
    of = getattr(torch, dtype)
    for rows, shared in ((1, False), (3, True)):
        arguments = case(selection).arguments(random(rows, WIDTH, seed=rows), shared, of)
        exact = [
            value.float() if isinstance(value, torch.Tensor) and value.dtype == of else value for value in arguments
        ]
        (ours, our_choice), (expected, _), (theirs, their_choice) = (
            on_triton(arguments),
            on_triton(exact),
            on_cpu(arguments),
        )
        assert ours.dtype == of
        assert (
            (ours.float() - expected).abs() <= torch.finfo(of).eps * expected.abs() + 1e-6 * expected.abs().max()
        ).all()
        assert close(ours, theirs) <= torch.finfo(of).eps
        assert_same_choice(our_choice, their_choice)


@pytest.mark.parametrize(("rows", "channels", "width"), [(2, 150, 520), (5, 70, 257), (16, 150, 70)], ids=str)
def test_more_than_one_tile_in_every_direction(rows: int, channels: int, width: int) -> None:
    gate, up, down = (random(channels, width, seed=seed) / width**0.5 for seed in (1, 2, 3))
    x, bias = random(rows, width, seed=4), random(width, seed=5)
    listed = torch.arange(0, channels, 2, dtype=torch.int32)
    choices = torch.arange(3, len(listed) - 2, dtype=torch.int32)
    for up_norms in (None, up.norm(dim=1)):
        arguments = [
            x,
            gate,
            up,
            down,
            None,
            None,
            bias,
            listed,
            choices,
            20,
            down.norm(dim=1),
            up_norms,
            "silu",
            False,
        ]
        (ours, our_choice), (theirs, their_choice) = on_triton(arguments), on_cpu(arguments)
        assert close(ours, theirs) < 1e-12
        assert_same_choice(our_choice, their_choice)


def test_results_do_not_vary() -> None:
    arguments = case().arguments(random(8, WIDTH, seed=0), False, torch.float32)
    (first, _), (second, _) = on_triton(arguments), on_triton(arguments)
    assert torch.equal(first, second)


# -- choices -----------------------------------------------------------------------------------------------------------


def by_hand(values: list[list[float]], count: int, shared: bool, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Channel i passes input i on, all norms are 1; compared with the CPU, NaN for NaN."""
    x = torch.tensor(values, dtype=torch.float64)
    eye, ones = torch.eye(x.shape[1], dtype=torch.float64), torch.ones(x.shape[1], dtype=torch.float64)
    everything = torch.arange(x.shape[1], dtype=torch.int32)
    named = dict(
        inputs=x, gate=None, up=eye, down=eye, gate_bias=None, up_bias=None, down_bias=None, channels=None,
        choices=everything, count=count, column_norms=ones, up_norms=None, act="relu", shared=shared,
    )  # fmt: skip
    arguments = list((named | changes).values())
    (ours, our_choice), (theirs, their_choice) = on_triton(arguments), on_cpu(arguments)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert_same_choice(our_choice, their_choice)
    return ours, our_choice


def test_ties_go_to_the_lower_position() -> None:
    outputs, picked = by_hand([[1.0, 2.0, 1.0, 2.0, 1.0, 0.0], [3.0] * 6], 3, shared=False)
    assert picked.tolist() == [[0, 1, 3], [0, 1, 2]]
    assert outputs.tolist() == [[1, 2, 0, 2, 0, 0], [3, 3, 3, 0, 0, 0]]
    _, picked = by_hand([[3.0, 0.0, 4.0, 5.0, 1.0], [4.0, 5.0, 3.0, 0.0, 1.0]], 2, shared=True)
    assert picked.tolist() == [[0, 1]]
    # More than any sort compares at once.
    _, picked = by_hand([[1.0] * 40], 7, shared=False)
    assert picked.tolist() == [list(range(7))]


@pytest.mark.parametrize("shared", [False, True], ids=["each", "shared"])
def test_nan_goes_first(shared: bool) -> None:
    biases = dict(up_bias=torch.tensor([0.0, torch.inf, -torch.nan, 0.0, torch.nan, torch.inf], dtype=torch.float64))
    for count, chosen in ((1, [2]), (2, [2, 4]), (3, [1, 2, 4])):
        for rows in (1, 2):
            _, picked = by_hand([[9.0] * 6] * rows, count, shared, **biases)
            assert picked.tolist() == [chosen] * (1 if shared else rows)


def test_what_nobody_keeps_is_not_read() -> None:
    down = torch.eye(4, dtype=torch.float64)
    down[3] = torch.inf
    outputs, _ = by_hand([[4.0, 3.0, 2.0, 1.0]], 2, shared=False, down=down)
    assert outputs.tolist() == [[4, 3, 0, 0]]
    up = torch.eye(4, dtype=torch.float64)
    up[3] = torch.nan
    gate = dict(gate=torch.eye(4, dtype=torch.float64), up=up, up_norms=torch.ones(4, dtype=torch.float64))
    outputs, _ = by_hand([[4.0, 3.0, 2.0, 1.0]], 2, shared=False, **gate)
    assert outputs.tolist() == [[16, 9, 0, 0]]


def test_a_closed_gate_stays_closed() -> None:
    gate = dict(gate=torch.eye(2, dtype=torch.float64), up_norms=torch.ones(2, dtype=torch.float64))
    outputs, _ = by_hand([[2.0, -1.0]], 2, shared=False, up_bias=torch.tensor([0, torch.inf]).double(), **gate)
    assert outputs.tolist() == [[4, 0]]


def test_all_or_none_of_the_choices() -> None:
    values = [[1.0, 2.0, 3.0], [3.0, 2.0, 1.0]]
    some = torch.tensor([0, 2], dtype=torch.int32)
    for shared in (False, True):
        groups = 1 if shared else 2
        assert by_hand(values, 0, shared, choices=some)[1].shape == (groups, 0)
        assert by_hand(values, 2, shared, choices=some)[1].tolist() == [[0, 2]] * groups
        assert by_hand(values, 0, shared, choices=some[:0])[0].tolist() == values
        assert by_hand(values, 0, shared, choices=None, column_norms=None)[1].shape == (groups, 0)


WRONG = {
    "no rows": dict(inputs=torch.zeros(0, WIDTH)),
    "too many rows": dict(inputs=torch.zeros(17, WIDTH)),
    "narrow inputs": dict(inputs=torch.zeros(1, WIDTH - 1)),
    "another type": dict(inputs=torch.zeros(1, WIDTH, dtype=torch.float64)),
    "down as it was": dict(down=torch.zeros(WIDTH, CHANNELS)),
    "strided": dict(up=torch.zeros(WIDTH, CHANNELS).T),
    "short bias": dict(down_bias=torch.zeros(1)),
    "int64 channels": dict(channels=torch.arange(3)),
    "double norms": dict(column_norms=torch.zeros(CHANNELS, dtype=torch.float64)),
    "no norms": dict(column_norms=None),
    "too large a count": dict(count=99),
    "a count of nothing": dict(choices=None),
    "a second choice of too many": dict(active=99),
    "a second choice without a first": dict(active=1, up_norms=None),
    "norms without a gate": dict(gate=None, gate_bias=None),
}
NAMES = (
    *("inputs", "gate", "up", "down", "gate_bias", "up_bias", "down_bias", "channels", "choices", "count"),
    *("column_norms", "up_norms", "act", "shared", "active"),
)


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments(name: str) -> None:
    arguments = dict(zip(NAMES, case("gate").arguments(random(1, WIDTH, seed=0), False, torch.float32), strict=True))
    with pytest.raises(ValueError, match=r"must|need"):
        on_triton(list((arguments | WRONG[name]).values()))


# -- in the library ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize("selection", SELECTIONS)
@torch.no_grad()
def test_a_model_runs_on_them(selection: str, scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(indexed, "engine", lambda device: ffn_decode)
    model = replace(BY_NAME["llama"], options=dict(num_hidden_layers=1)).build().to(DEVICE)
    ids, mask = (part.to(DEVICE) for part in left_padded([9, 5]))
    method = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3, selection=selection, scope=scope)
    found = []
    for backend in ("indexed", "masked"):
        with InFloat64(), sp.prune(model, replace(method, backend=backend)) as handle, handle.stage(prefill=7):
            assert {part.backend for part in handle.report().channels} == {backend}
            found.append(model(ids, attention_mask=mask, logits_to_keep=2).logits)
    assert close(*found) < 1e-10


def test_devices() -> None:
    assert engine.why_no_engine(torch.device("cuda")) is None
    assert engine.engine(torch.device("cuda")) is ffn_decode
    assert "meta" in (engine.why_no_engine(torch.device("meta")) or "")


def run(code: str, folder: Path) -> str:
    """In a process of its own: Triton reads its environment when it is imported."""
    environment = os.environ | dict(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(folder), TRITON_DEFAULT_FP_FUSION="1")
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_triton(tmp_path: Path) -> None:
    code = """
import sys
sys.modules["triton"] = None  # as if it were not installed
import torch
import stageprune.channels.pruner
from stageprune.channels.kernels.engine import engine, why_no_engine
print(why_no_engine(torch.device("cuda")))
if why_no_engine(torch.device("cpu")) is None:
    engine(torch.device("cpu"))
"""
    assert "need Triton" in run(code, tmp_path)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from stageprune.channels.kernels import triton_kernels as kernels
from stageprune.channels.kernels.triton_ffn import _TILES

def build(kernel, capability, types, **constants):
    signature = {name: types.get(name, "i32") for name in kernel.arg_names}
    signature |= dict.fromkeys(constants, "constexpr")
    values = {(place,): constants[name] for place, name in enumerate(kernel.arg_names) if name in constants}
    built = compile(ASTSource(kernel, signature, values), target=GPUTarget("cuda", capability, 32))
    assert built.asm["cubin"]

for capability, weight, rows in (80, "*bf16", 1), (80, "*fp32", 8), (90, "*fp16", 16), (90, "*fp64", 2):
    sums = "*fp64" if weight == "*fp64" else "*fp32"
    matrices = "inputs weight bias times times_bias outputs".split()
    types = dict.fromkeys(matrices, weight) | dict(hidden=sums, parts=sums, channels="*i32", keep="*i1")
    tile = dict(zip(("BLOCK_C", "BLOCK_D"), _TILES[rows]), ROWS=rows)
    act = {1: "silu", 2: "relu", 8: "gelu", 16: "gelu_tanh"}[rows]
    build(kernels.activated, capability, types, ACT=act, **tile)
    build(kernels.down_parts, capability, types, **tile)
    build(kernels.down_total, capability, types, SPLITS=64, BLOCK=64)
    if rows == 1:
        build(kernels.activated, capability, types, ACT=act, bias=None, times=None, times_bias=None, **tile)
        build(kernels.multiply, capability, types, bias=None, **tile)
        build(kernels.down_parts, capability, types, channels=None, keep=None, **tile)
print("built")
"""


def test_they_compile_for_gpus(tmp_path: Path) -> None:
    """To machine code of the A100 (8.0) and the H100 (9.0), which needs neither: the interpreter accepts more."""
    assert "built" in run(COMPILE, tmp_path)
