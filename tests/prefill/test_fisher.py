"""Gradients of the gates against finite differences, a two-stage reference with a cache, and the theory."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch

from helpers import close, in_float64, surface, tokens
from reference import two_stage
from stageprune.prefill.fisher import Sequences, gate_gradients, response_losses
from stageprune.prefill.gates import VirtualGates
from stageprune.prefill.importance import Estimate
from stageprune.prefill.responses import sample_responses
from zoo import ARCHITECTURES, BY_NAME, MORE, VOCAB

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (9, 5, 7)]
RESPONSES = [tokens(1, length, seed=length)[0].tolist() for length in (4, 6, 1)]
STEP = 1e-5


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE, ids=lambda architecture: architecture.name)
def test_gradients_of_every_family(architecture: Any) -> None:
    """Against central differences; one by one as in a batch; and 0 where nothing can reach the loss."""
    model = architecture.build()
    sequences = Sequences.of(PROMPTS, RESPONSES)
    with in_float64(model), VirtualGates(model) as gates:
        ours = gate_gradients(gates, sequences)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            alone = gate_gradients(gates, Sequences.of([prompt], [response]))
            for name in ("loss", "prefill", "decode"):
                assert close(getattr(ours, name)[row : row + 1], getattr(alone, name)) < 1e-10, name
        generator = torch.Generator().manual_seed(0)
        for _ in range(2):
            directions = torch.randn(2, 3, 6, dtype=torch.float64, generator=generator)
            ends = []
            for sign in (1, -1):
                prefill, decode = 1 + sign * STEP * directions
                with torch.no_grad(), gates.at(prefill, decode, sequences.width - 1):
                    ends.append(response_losses(model, sequences, torch.float64))
            expected = (ends[0] - ends[1]) / (2 * STEP)
            slopes = (directions[0] * ours.prefill + directions[1] * ours.decode).sum(-1)
            assert close(slopes, expected) < 1e-6
    assert ours.prefill.dtype == torch.float64
    assert (ours.prefill[:, -1] == 0).all(), "the last layer's prompt rows reach nothing"
    assert (ours.prefill[:, :-1] != 0).all()
    assert (ours.decode != 0).all()


@pytest.mark.parametrize("row", [0, 1, 2])
def test_two_stages_with_a_cache_have_the_same_loss_and_gradients(row: int) -> None:
    model = BY_NAME["llama"].build()
    prompt, response = torch.tensor([PROMPTS[row]]), torch.tensor([RESPONSES[row]])
    with in_float64(model):
        with VirtualGates(model) as gates:
            ours = gate_gradients(gates, Sequences.of([PROMPTS[row]], [RESPONSES[row]]))
        opened = [torch.ones(6, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        loss = two_stage.loss(model, prompt, response, *opened)
        by_prefill, by_decode = torch.autograd.grad(loss, opened, allow_unused=True)
        assert close(ours.loss, loss.detach()[None]) < 1e-12
        assert close(ours.prefill[0], by_prefill) < 1e-10
        assert close(ours.decode[0], by_decode) < 1e-10
        with torch.no_grad():
            for stage in (0, 1):
                for layer in range(6):
                    ends = []
                    for sign in (1, -1):
                        values = torch.ones(2, 6, dtype=torch.float64)
                        values[stage, layer] += sign * STEP
                        ends.append(two_stage.loss(model, prompt, response, *values))
                    difference = (ends[0] - ends[1]) / (2 * STEP)
                    mine = (ours.prefill, ours.decode)[stage]
                    assert abs(difference - mine[0, layer]) < 1e-6 * mine.abs().max(), (stage, layer)


def test_gradients_of_large_gates_are_two_stage_too() -> None:
    """Not only at 1: gates far from it, different in each stage."""
    model = BY_NAME["llama"].build()
    prefill, decode = torch.linspace(0, 2, 6).double(), torch.linspace(1.5, 0.2, 6).double()
    sequences = Sequences.of(PROMPTS[:1], RESPONSES[:1])
    with in_float64(model), torch.no_grad(), VirtualGates(model) as gates:
        expected = two_stage.loss(model, torch.tensor(PROMPTS[:1]), torch.tensor(RESPONSES[:1]), prefill, decode)
        with gates.at(prefill[None], decode[None], sequences.width - 1):
            ours = response_losses(model, sequences, torch.float64)
    assert close(ours, expected[None]) < 1e-12


def test_the_fisher_identities_hold_exactly() -> None:
    """Eq. 7 and 8 over all responses of one token: E[g] = 0, and E[g^2] is the second derivative of E[L]."""
    model = BY_NAME["qwen3"].build()
    prompt = PROMPTS[0]
    sequences = Sequences.of([prompt] * VOCAB, [[token] for token in range(VOCAB)])
    with in_float64(model), VirtualGates(model) as gates:
        ours = gate_gradients(gates, sequences)
        probability = (-ours.loss).exp()
        assert abs(probability.sum().item() - 1) < 1e-12
        for stage, name in enumerate(("prefill", "decode")):
            gradient = getattr(ours, name)
            assert (probability @ gradient).abs().max() < 1e-12 * gradient.abs().max()
            scores = probability @ gradient**2
            for layer in (0, 4):
                losses = []
                for shift in (1e-4, 0.0, -1e-4):
                    values = torch.ones(2, 1, 6, dtype=torch.float64)
                    values[stage, 0, layer] += shift
                    with torch.no_grad(), gates.at(*values, sequences.width - 1):
                        losses.append(probability @ response_losses(model, sequences, torch.float64))
                curvature = (losses[0] - 2 * losses[1] + losses[2]) / 1e-8
                assert abs(curvature / scores[layer] - 1) < 1e-4, (name, layer)


def gradients_over(model: Any, responses: list[list[int]]) -> list[Estimate]:
    with VirtualGates(model) as gates:
        ours = gate_gradients(gates, Sequences.of([PROMPTS[1]] * len(responses), responses))
    both = torch.cat((ours.prefill[:, :-1], ours.decode), dim=1)
    return [Estimate.of(column.tolist()) for column in both.T]


def test_mean_gradients_vanish_over_the_models_own_responses_only() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    own = sample_responses(model, [PROMPTS[1]] * 600, range(600), seed=0, max_tokens=5)
    assert max(estimate.sigmas for estimate in gradients_over(model, own)) < 4
    foreign = tokens(600, 5, seed=9).tolist()
    assert max(estimate.sigmas for estimate in gradients_over(model, foreign)) > 8


@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float32, 1e-4), (torch.bfloat16, 0.15)], ids=str)
def test_lower_precision_sums_in_float32(dtype: torch.dtype, allowed: float) -> None:
    model = BY_NAME["granite"].build(dtype)
    exact = BY_NAME["granite"].build(torch.float64)
    exact.load_state_dict(model.state_dict())
    results = []
    for each, precision in ((model, nullcontext()), (exact, in_float64(exact))):
        with precision, VirtualGates(each) as gates:
            results.append(gate_gradients(gates, Sequences.of(PROMPTS, RESPONSES)))
    assert results[0].prefill.dtype == results[0].decode.dtype == results[0].loss.dtype == torch.float32
    assert close(results[0].prefill, results[1].prefill) < allowed
    assert close(results[0].decode, results[1].decode) < allowed


def test_each_layer_is_computed_once_more_and_the_weights_get_no_gradient() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    model.lm_head.weight.requires_grad_(False)
    flags = [parameter.requires_grad for parameter in model.parameters()]
    before = surface(model)
    calls = []
    with VirtualGates(model) as gates:
        hooks = [layer.self_attn.register_forward_hook(lambda *_: calls.append(1)) for layer in model.model.layers]
        with torch.no_grad():  # it needs gradients whatever the caller's mode
            gate_gradients(gates, Sequences.of(PROMPTS, RESPONSES))
        for hook in hooks:
            hook.remove()
    assert len(calls) == 2 * 6
    assert [parameter.requires_grad for parameter in model.parameters()] == flags
    assert all(parameter.grad is None for parameter in model.parameters())
    assert surface(model) == before
