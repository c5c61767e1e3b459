"""The fit of K/V projections against least squares over rows, and the cases whose answer is known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from helpers import InFloat64, close, surface, tokens
from reference.kv_fit import fit, linear_modules, rows_of
from reference.prefill_oracle import layers_of
from stageprune.families.decoder import find_decoder
from stageprune.families.verify import verify_layers
from stageprune.prefill.fitted import own_weights
from stageprune.prefill.fitting import Fitter, Sums, first_of_runs
from stageprune.prefill.projections import Correction
from zoo import ARCHITECTURES, BY_NAME, Architecture

TEXTS = [tokens(2, 24, seed=1), tokens(1, 31, seed=2)]
RIDGE = 0.03


@pytest.fixture(autouse=True)
def in_float64():
    with InFloat64():
        yield


def attention_of(model: Any, texts: list[torch.Tensor]) -> list[torch.Tensor]:
    """For each layer what tokens get from later ones, summed over heads, of all texts one after the other."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        passes = [model(input_ids=ids, output_attentions=True, use_cache=False).attentions for ids in texts]
    model.set_attn_implementation(before)
    masses = []
    for layer in zip(*passes, strict=True):
        rows = []
        for probabilities in layer:  # [batch, heads, queries, keys]
            for sequence in probabilities:
                length = sequence.shape[-1]
                rows += [sequence[:, key + 1 :, key].sum() for key in range(length)]
        masses.append(torch.stack(rows))
    return masses


def read(model: Any, skipped: tuple[int, ...], texts: list[torch.Tensor], weighted: bool = False) -> dict[int, Sums]:
    fitter = Fitter(find_decoder(model), skipped, weighted)
    sums = fitter.zeros()
    for ids in texts:
        fitter.read(sums, ids)
    return sums


def check(model: Any, skipped: tuple[int, ...], weighted: bool) -> None:
    sums = read(model, skipped, TEXTS, weighted)
    rows = rows_of(model, skipped, TEXTS)
    before = model.config._attn_implementation
    masses = attention_of(model, TEXTS) if weighted else None
    assert model.config._attn_implementation == before
    for index in skipped:
        weights = torch.ones(sum(ids.numel() for ids in TEXTS)) if masses is None else masses[index]
        inputs, answers, targets = rows[index]
        correction, bias = fit(rows[index], weights, RIDGE)
        ours = sums[index].solve(RIDGE)
        scale = max(correction.abs().max(), bias.abs().max(), 1e-6)
        assert (ours[0] - correction).abs().max() < 1e-8 * scale, index
        assert (ours[1] - bias).abs().max() < 1e-8 * scale, index
        left = targets - answers - inputs @ correction.T - bias
        expected = (weights[:, None] * left.square()).sum(0)
        assert torch.allclose(sums[index].errors(*ours), expected, rtol=1e-7, atol=1e-9 * float(targets.square().sum()))
        mean = (weights[:, None] * targets).sum(0) / weights.sum()
        assert close(sums[index].variance(), (weights[:, None] * (targets - mean).square()).sum(0)) < 1e-8


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_the_fit_is_the_least_squares_solution(architecture: Architecture) -> None:
    check(architecture.build(), (1, 2, 4, 5), weighted=True)


def test_the_fit_of_one_run_of_layers() -> None:
    check(BY_NAME["llama-bias"].build(), (4, 5), weighted=False)


def test_the_oracle_has_something_to_fit() -> None:
    """Else everything above would hold for a fit of nothing."""
    model = BY_NAME["llama"].build()
    for index, (_, answers, targets) in rows_of(model, (1, 2, 4), TEXTS).items():
        assert (close(answers, targets) > 1e-2) == (index != 1), "layer 1 sees in both what the full model has"


def test_batches_and_their_order_change_rounding_only() -> None:
    model = BY_NAME["qwen2"].build()
    together = read(model, (3, 5), TEXTS)
    rows = [row[None] for ids in reversed(TEXTS) for row in ids]
    alone = read(model, (3, 5), rows)
    for index, sums in together.items():
        for name, tensor in sums.tensors().items():
            difference = (alone[index].tensors()[name] - tensor).abs().max()
            assert difference <= 1e-12 * tensor.abs().max(), (index, name)
        assert sums.weight == sum(ids.numel() for ids in TEXTS)


def test_the_model_is_left_as_it_was() -> None:
    model = BY_NAME["gemma3"].build()
    before = surface(model)
    read(model, (1, 4, 5), TEXTS)
    assert surface(model) == before


def test_an_exact_linear_relation_is_found() -> None:
    generator = torch.Generator().manual_seed(0)
    relation, constant = torch.randn(6, 8, generator=generator).double(), torch.randn(6, generator=generator).double()
    inputs = torch.randn(50, 8, generator=generator).double() + 1
    errors = inputs @ relation.T + constant
    sums = Sums.zeros(8, 6)
    sums.add(inputs, errors, errors, torch.ones(50))
    correction, bias = sums.solve(1e-14)
    assert close(correction, relation) < 1e-9
    assert close(bias, constant) < 1e-9
    assert float(sums.errors(correction, bias).sum()) < 1e-12 * float(sums.squares.sum())


def test_more_ridge_means_less_correction() -> None:
    sums = read(BY_NAME["llama"].build(), (4, 5), TEXTS)[5]
    sizes = [float(sums.solve(ridge)[0].norm()) for ridge in (1e-4, 1e-2, 1, 1e4)]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] < 1e-3 * sizes[0]


def test_first_of_runs() -> None:
    assert first_of_runs((7, 2, 3, 5, 6)) == {2: 2, 3: 2, 5: 5, 6: 5, 7: 5}


def test_low_rank_is_the_best_of_its_rank() -> None:
    """By the mean of keys' and values' shares of variance; against the singular values, and against other choices."""
    generator = torch.Generator().manual_seed(2)
    keys, rank = 5, 3
    inputs = torch.randn(60, 8, generator=generator).double() * torch.arange(1, 9) + 2
    targets = torch.randn(60, 11, generator=generator).double() * torch.cat((torch.full((5,), 30.0), torch.ones(6)))
    sums = Sums.zeros(8, 11)
    sums.add(inputs, targets, targets, torch.ones(60))
    full = Correction.of(*sums.solve(1e-12))
    low = full.low_rank(rank, sums, keys)
    assert [tuple(part.shape) for part in low.matrix] == [(11, rank), (rank, 8)]

    def loss(matrix: torch.Tensor, bias: torch.Tensor) -> float:
        changed = (full.whole - matrix) @ inputs.T + (full.bias.double() - bias.double())[:, None]
        variance = (targets - targets.mean(0)).square().sum(0)
        return sum(
            float(changed[part].square().sum() / variance[part].sum()) for part in (slice(keys), slice(keys, None))
        )

    centred = inputs - inputs.mean(0)
    variance = (targets - targets.mean(0)).square().sum(0)
    scale = torch.cat((variance[:keys].sum().rsqrt().expand(keys), variance[keys:].sum().rsqrt().expand(6)))
    sizes = torch.linalg.svdvals(scale[:, None] * full.whole @ centred.T)
    best = loss(low.whole, low.bias)
    assert best == pytest.approx(float(sizes[rank:].square().sum()), rel=1e-4)
    assert best > 1e-3
    for _ in range(50):
        left, right = (
            part + 0.02 * part.abs().mean() * torch.randn(part.shape, generator=generator) for part in low.matrix
        )
        bias = low.bias + 0.02 * torch.randn(low.bias.shape, generator=generator)
        assert loss((left @ right).double(), bias) > best
    plain = torch.linalg.svd(full.whole)
    truncated = plain[0][:, :rank] * plain[1][:rank] @ plain[2][:rank]
    assert loss(truncated, full.bias + ((full.whole - truncated) @ inputs.mean(0)).float()) > best


def test_the_loss_that_rank_adds_is_what_errors_say() -> None:
    sums = read(BY_NAME["llama"].build(), (4, 5), TEXTS)[5]
    full = Correction.of(*sums.solve(1e-3))
    losses = []
    for rank in (1, 4, 12, 32):
        low = full.low_rank(rank, sums, 16)
        losses.append(float(sums.errors(low.whole, low.bias).sum()))
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] == pytest.approx(float(sums.errors(full.whole, full.bias).sum()), rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_own_weights_are_read_exactly(architecture: Architecture, dtype: torch.dtype) -> None:
    """Also beside biases that are far larger, in types that hold few digits."""
    model = architecture.build(dtype)
    modules = linear_modules(layers_of(model)[4])
    for module in modules:
        if module.bias is not None:
            module.bias.data.mul_(1000)
    own = own_weights(verify_layers(find_decoder(model), [4])[4])
    held = {tuple(row) for module in modules for row in module.weight.double().tolist()}
    assert {tuple(row) for row in own.weight.tolist()} <= held
    if len(modules) == 2:
        assert torch.equal(own.weight, torch.cat([module.weight.double() for module in modules]))
        biases = [module.bias for module in modules]
        expected = torch.zeros(len(own.weight)) if biases[0] is None else torch.cat(biases)
        assert torch.equal(own.bias, expected.double())
        assert own.keys == len(modules[0].weight)


def test_weights_that_do_not_answer_linearly_are_refused() -> None:
    import stageprune as sp

    class Rounding(nn.Linear):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return super().forward(inputs.sign() * inputs.abs().sqrt())

    model = BY_NAME["llama"].build()
    layer = model.model.layers[4].self_attn
    old, layer.k_proj = layer.k_proj, Rounding(*reversed(layer.k_proj.weight.shape), bias=False).double()
    layer.k_proj.weight = old.weight
    with pytest.raises(sp.UnsupportedModelError, match="layer 4: its K/V weights cannot be read"):
        Fitter(find_decoder(model), [4, 5])
