"""The reference itself: sizes of the paper's models, examples by hand, and identities it must satisfy."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from helpers import close, left_padded, tokens
from reference import channel_ffn as ref
from reference.channel_oracle import channel_logits, greedy, mlp_ratio, weights_of
from reference.prefill_oracle import layers_of
from stageprune.methods import OnlineChannelPruning
from zoo import ARCHITECTURES, BY_NAME, MORE

pytestmark = pytest.mark.usefixtures("everything_in_float64")

LLAMA = replace(BY_NAME["llama"], options=dict(num_hidden_layers=2))
METHOD = OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3)


# h, r_mlp, active, |P|, |C|, |R|, picked from C: the table in section 1.4 of the digest.
TABLE = [
    (11008, 0.299, 7717, 2741, 1101, 7166, 551),
    (11008, 0.598, 4425, 6032, 1101, 3875, 550),
    (13824, 0.299, 9691, 3442, 1382, 9000, 691),
    (13824, 0.598, 5557, 7576, 1382, 4866, 691),
    (28672, 0.243, 21705, 5534, 2867, 20271, 1434),
    (28672, 0.486, 14737, 12501, 2867, 13304, 1433),
    (14336, 0.248, 10781, 2839, 1434, 10063, 718),
    (14336, 0.495, 7240, 6380, 1434, 6522, 718),
    (12288, 0.256, 9142, 2531, 1229, 8528, 614),
    (12288, 0.511, 6009, 5665, 1229, 5394, 615),
    (25600, 0.248, 19251, 5069, 2560, 17971, 1280),
    (25600, 0.496, 12902, 11418, 2560, 11622, 1280),
    (1408, 0.297, 990, 348, 141, 919, 71),
    (1408, 0.594, 572, 766, 141, 501, 71),
    (2560, 0.227, 1979, 453, 256, 1851, 128),
    (2560, 0.453, 1400, 1032, 256, 1272, 128),
    (768, 0.300, 538, 192, 77, 499, 39),
    (768, 0.600, 307, 422, 77, 269, 38),
    (18944, 0.229, 14606, 3391, 1894, 13659, 947),
    (18944, 0.458, 10268, 7729, 1894, 9321, 947),
]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_sizes_of_the_papers_models(row) -> None:
    channels, ratio, active, pruned, candidates, retained, picked = row
    ours = ref.sizes(channels, ratio, delta=0.05)
    assert ours.active == active
    assert abs(ours.pruned - pruned) <= 1
    assert abs(ours.candidates - candidates) <= 1
    assert abs(ours.retained - retained) <= 1
    assert abs(ours.picked - picked) <= 1
    assert ours.retained + ours.picked == ours.active
    assert ours.retained + ours.candidates + ours.pruned == channels


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (dict(channels=10, ratio=0.0, delta=0.5), (10, 0, 0, 10)),
        (dict(channels=10, ratio=0.1, delta=0.3), (6, 4, 0, 9)),  # r - delta < 0: nothing is pruned
        (dict(channels=10, ratio=0.8, delta=0.3), (0, 5, 5, 2)),  # r + delta > 1: nothing is retained
        (dict(channels=10, ratio=0.5, delta=0.5), (0, 10, 0, 5)),  # everything is a candidate
        (dict(channels=10, ratio=0.5, delta=0.0), (5, 0, 5, 5)),  # nothing is
        (dict(channels=10, ratio=0.25, delta=0.0), (7, 0, 3, 7)),  # halves go up: 2.5 pruned are 3, which leaves 7
        (dict(channels=10, ratio=0.99, delta=0.0), (0, 1, 9, 1)),  # somebody must be active
        (dict(channels=10, ratio=0.3, delta=-0.2), (5, 0, 5, 5)),  # more pruned than the budget allows active
        (dict(channels=10, ratio=0.5, delta=0.1, multiple=4), (4, 4, 2, 8)),
        (dict(channels=10, ratio=0.5, delta=0.2, multiple=4), (4, 4, 2, 8)),
        (dict(channels=10, ratio=0.2, delta=0.1, multiple=8), (8, 2, 0, 8)),
        (dict(channels=3, ratio=0.5, delta=0.05, multiple=64), (3, 0, 0, 3)),
    ],
    ids=str,
)
def test_sizes_by_hand(arguments, expected) -> None:
    assert ref.sizes(**arguments) == ref.Sizes(*expected)


@given(
    channels=st.integers(1, 300),
    ratio=st.floats(0, 1, exclude_max=True),
    delta=st.floats(-1, 1),
    multiple=st.integers(1, 70),
)
@settings(max_examples=300)
def test_sizes_are_always_possible(channels: int, ratio: float, delta: float, multiple: int) -> None:
    ours = ref.sizes(channels, ratio, delta, multiple)
    assert ours.retained + ours.candidates + ours.pruned == channels
    assert min(ours.retained, ours.candidates, ours.pruned) >= 0
    assert 0 <= ours.picked <= ours.candidates
    assert ours.active >= 1
    for count in (ours.active, ours.retained, channels - ours.pruned):
        assert count % multiple == 0 or count in (channels, ours.active, channels - ours.pruned)


# -- one FFN -----------------------------------------------------------------------------------------------------------


def by_hand() -> ref.Weights:
    """Channel i passes input i on; the column norms are 1, 2, 3 and 4."""
    down = torch.diag(torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64))
    eye = torch.eye(4, dtype=torch.float64)
    return ref.Weights(None, None, eye, None, down, None, lambda x: x)


def random_ffn(channels: int = 12, gated: bool = True, bias: bool = True, width: int = 5, seed: int = 0) -> ref.Weights:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return ref.Weights(
        random(channels, width) if gated else None,
        random(channels) if gated and bias else None,
        random(channels, width),
        random(channels) if bias else None,
        random(width, channels),
        random(width) if bias else None,
        F.silu,
    )


def rows(count: int, width: int = 5, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def matrix_form(ffn: ref.Weights, x: torch.Tensor, keep: list[int] | None = None) -> torch.Tensor:
    """The FFN as modules compute it, with the other channels' activations set to 0."""
    up = F.linear(x, ffn.up, ffn.up_bias)
    activations = ffn.act(up) if ffn.gate is None else ffn.act(F.linear(x, ffn.gate, ffn.gate_bias)) * up
    if keep is not None:
        masked = torch.zeros_like(activations)
        masked[..., keep] = activations[..., keep]
        activations = masked
    return F.linear(activations, ffn.down, ffn.down_bias)


def test_a_prompt_and_a_token_by_hand() -> None:
    ffn = by_hand()
    prompt = torch.tensor([[3.0, 0.0, 0.0, 1.0], [4.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    sums = ref.add_rows(ffn, ref.no_rows(ffn), prompt)
    assert sums.tolist() == [25, 1, 0, 1]
    parts = ref.partition(ffn, sums, ref.Sizes(1, 2, 1, 2))  # scores 5, 2, 0, 4
    assert parts.order == [0, 3, 1, 2]
    assert (parts.retained, parts.candidates, parts.pruned) == ([0], [1, 3], [2])
    x = torch.tensor([[1.0, 10.0, 100.0, 6.0]], dtype=torch.float64)
    assert ref.prefill_rows(ffn, x, parts, "dense").tolist() == [[1, 20, 300, 24]]
    assert ref.prefill_rows(ffn, x, parts, "candidates").tolist() == [[1, 20, 0, 24]]
    assert ref.prefill_rows(ffn, x, parts, "budget").tolist() == [[1, 0, 0, 24]]
    for rule, expected in {
        "fixed": [1, 0, 0, 24],
        "partition": [1, 0, 0, 24],  # candidates score 20 and 24
        "full": [0, 0, 300, 24],
    }.items():
        assert ref.decode_step(ffn, x, parts, rule).tolist() == [expected], rule
    both = torch.cat((x, torch.tensor([[0.0, 10.0, 0.0, 0.0]], dtype=torch.float64)))
    together = ref.decode_step(ffn, both, parts, "partition")  # scores 20 sqrt(2) and 24: a shared choice
    assert together.tolist() == [[1, 20, 0, 0], [0, 20, 0, 0]]


@pytest.mark.parametrize(("gated", "bias"), list(itertools.product([False, True], repeat=2)))
def test_rows_equal_the_matrix_form(gated: bool, bias: bool) -> None:
    ffn, x, prompt = random_ffn(gated=gated, bias=bias), rows(1), rows(4, seed=2)
    assert torch.allclose(ref.dense(ffn, x), matrix_form(ffn, x), atol=1e-13)
    parts = ref.partition(ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt), ref.sizes(12, 0.4, 0.15))
    for rule in ("partition", "fixed", "full") + (("gate",) if gated else ()):
        keep = ref.chosen(ffn, x, parts, rule)
        assert len(set(keep)) == parts.active
        if rule != "full":
            assert set(keep).isdisjoint(parts.pruned)
        if rule in ("partition", "fixed"):
            assert set(parts.retained) <= set(keep)
        assert torch.allclose(ref.decode_step(ffn, x, parts, rule), matrix_form(ffn, x, keep), atol=1e-13)


def test_the_gate_chooses_by_gate_and_norms_alone() -> None:
    ffn, x, prompt = random_ffn(), rows(1), rows(4, seed=2)
    parts = ref.partition(ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt), ref.sizes(12, 0.5, 0.5))
    scores = F.silu(F.linear(x, ffn.gate, ffn.gate_bias)).abs() * ffn.up.norm(dim=1) * ffn.down.norm(dim=0)
    assert ref.chosen(ffn, x, parts, "gate") == sorted(scores[0].topk(6).indices.tolist())


def test_scores_are_norms_of_the_weighted_columns() -> None:
    """`I_i` is the norm of everything that channel i adds to the FFN's output over the prompt (Eq. 3, reading A)."""
    ffn, prompt = random_ffn(bias=False), rows(7)
    scores = ref.column_norms(ffn) * ref.add_rows(ffn, ref.no_rows(ffn), prompt).sqrt()
    for channel in range(12):
        assert math.isclose(scores[channel].item(), matrix_form(ffn, prompt, [channel]).norm().item(), rel_tol=1e-12)


def test_everything_a_candidate_equals_full() -> None:
    ffn, x, prompt = random_ffn(), rows(2), rows(7, seed=2)
    parts = ref.partition(ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt), ref.sizes(12, 0.5, 0.5))
    assert len(parts.candidates) == 12
    assert ref.chosen(ffn, x, parts, "partition") == ref.chosen(ffn, x, parts, "full")


def test_ties_go_to_the_lower_index() -> None:
    assert ref.ranked(torch.tensor([1.0, 2.0, 1.0, 2.0, 0.0])) == [1, 3, 0, 2, 4]
    ffn = replace(by_hand(), down=torch.eye(4, dtype=torch.float64))
    ones = torch.ones(1, 4, dtype=torch.float64)
    parts = ref.partition(ffn, ref.add_rows(ffn, ref.no_rows(ffn), ones), ref.Sizes(1, 2, 1, 2))
    assert (parts.retained, parts.candidates, parts.pruned) == ([0], [1, 2], [3])
    for rule in ("partition", "fixed", "full"):
        assert ref.chosen(ffn, ones, parts, rule) == [0, 1]


def test_nan_is_more_than_infinity() -> None:
    scores = [0.5, math.inf, math.nan, 2.0, math.nan, -math.inf]
    assert ref.ranked(torch.tensor(scores)) == [2, 4, 1, 3, 0, 5]
    ffn = replace(by_hand(), act=lambda x: x.masked_fill(x == -1, math.nan).masked_fill(x == -2, math.inf))
    prompt = torch.tensor([[9.0, -2.0, 7.0, -1.0]], dtype=torch.float64)
    parts = ref.partition(ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt), ref.Sizes(2, 1, 1, 2))
    assert parts.order == [3, 1, 2, 0]
    assert ref.prefill_rows(ffn, prompt, parts, "candidates").isnan().any()
    parts = ref.partition(ffn, torch.tensor([0.0, 1.0, 1.0, 1.0]).double(), ref.Sizes(0, 3, 1, 1))
    x = torch.tensor([[-1.0, 5.0, -2.0, -1.0]], dtype=torch.float64)
    assert ref.chosen(ffn, x, parts, "partition") == ref.chosen(ffn, torch.cat((x, x)), parts, "partition") == [3]
    assert ref.chosen(ffn, x, parts, "full") == [0]


def test_statistics_do_not_depend_on_chunks() -> None:
    ffn, prompt = random_ffn(), rows(9)
    whole = ref.add_rows(ffn, ref.no_rows(ffn), prompt)
    parts = ref.add_rows(ffn, ref.add_rows(ffn, ref.no_rows(ffn), prompt[:4]), prompt[4:])
    assert torch.allclose(whole, parts, rtol=1e-14)


# -- whole models ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE, ids=lambda architecture: architecture.name)
@torch.no_grad()
def test_the_weights_of_each_family_are_those_of_its_ffn(architecture) -> None:
    module = layers_of(architecture.build())[1].mlp
    x = torch.randn(1, 3, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert close(matrix_form(weights_of(module), x), module(x)) < 1e-13


@torch.no_grad()
def test_the_paths_that_prune_nothing_are_dense() -> None:
    model = LLAMA.build()
    ids = tokens(2, 9)
    dense = model(ids).logits
    for method in (
        OnlineChannelPruning(0),
        OnlineChannelPruning(mlp_ratio=0),
        OnlineChannelPruning(ratios=[0] * 2),
        replace(METHOD, protect=range(2)),
    ):
        assert torch.equal(channel_logits(model, method, 8, input_ids=ids), dense)
    assert close(channel_logits(model, METHOD, 0, input_ids=ids), dense) < 1e-12


@torch.no_grad()
def test_the_oracle_differs_from_dense_and_between_all_settings() -> None:
    """Else tests against it would hold for a method that prunes nothing, or ignores a setting."""
    model = LLAMA.build()
    ids = tokens(2, 12)
    found = [model(ids).logits[:, -1]]
    for selection, prefill, scope in itertools.product(
        ("partition", "fixed", "full", "gate"), ("candidates", "budget", "dense"), ("batch", "sequence")
    ):
        method = replace(METHOD, selection=selection, prefill=prefill, scope=scope)
        found.append(channel_logits(model, method, 9, input_ids=ids)[:, -1])
    assert all(close(a, b) > 1e-4 for a, b in itertools.combinations(found, 2))
    assert not vars(layers_of(model)[0].mlp).get("forward"), "the model is given back"


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@torch.no_grad()
def test_padding_never_counts(scope: str) -> None:
    model = LLAMA.build()
    method = replace(METHOD, scope=scope)
    ids, mask = left_padded([11, 11])
    wide = torch.cat((torch.zeros(2, 3, dtype=ids.dtype), ids), dim=1)
    wide_mask = torch.cat((torch.zeros(2, 3, dtype=mask.dtype), mask), dim=1)
    _, narrow = greedy(model, method, ids, 2, attention_mask=mask)
    _, padded = greedy(model, method, wide, 2, attention_mask=wide_mask)
    assert close(padded, narrow) < 1e-12


@torch.no_grad()
def test_sequence_scope_is_each_prompt_alone() -> None:
    model = LLAMA.build()
    method = replace(METHOD, scope="sequence")
    ids, mask = left_padded([11, 6, 1])
    _, together = greedy(model, method, ids, 2, attention_mask=mask)
    for row, length in enumerate([11, 6, 1]):
        _, alone = greedy(model, method, ids[row : row + 1, -length:], 2)
        assert close(together[row : row + 1], alone) < 1e-12


@torch.no_grad()
def test_where_passes_begin_matters_only_where_the_prompt_is_pruned() -> None:
    model = LLAMA.build()
    ids = tokens(1, 12)
    for prefill, same in (("dense", True), ("candidates", False), ("budget", False)):
        method = replace(METHOD, prefill=prefill)
        whole = channel_logits(model, method, 11, input_ids=ids)[:, -1]
        chunked = channel_logits(model, method, 11, passes=(2, 5), input_ids=ids)[:, -1]
        assert (close(chunked, whole) < 1e-12) is same, prefill
    first = channel_logits(model, METHOD, 11, input_ids=ids)
    assert torch.equal(channel_logits(model, METHOD, 11, passes=(0, 11), input_ids=ids), first)


@torch.no_grad()
def test_a_further_turn_does_not_change_what_was_before() -> None:
    model = LLAMA.build()
    ids = tokens(1, 14)
    context = torch.zeros(1, 14, dtype=torch.bool)
    context[:, :5] = True
    first = channel_logits(model, METHOD, context[:, :8], input_ids=ids[:, :8])
    context[:, 8:13] = True
    both = channel_logits(model, METHOD, context, input_ids=ids)
    assert close(both[:, :8], first) < 1e-12
    assert torch.equal(channel_logits(model, METHOD, context, passes=(8,), input_ids=ids), both)


def test_the_overall_ratio_is_taken_from_the_ffn_alone() -> None:
    model = LLAMA.build()
    assert mlp_ratio(model, OnlineChannelPruning(0.2), 0) == pytest.approx(0.2 * (3072 + 4608) / 4608)
    assert mlp_ratio(model, OnlineChannelPruning(0.2, mlp_ratio=0.3), 0) == 0.3
    assert mlp_ratio(model, OnlineChannelPruning(0.2, mlp_ratio=0.3, ratios=[0.1, 0.6]), 1) == 0.6
