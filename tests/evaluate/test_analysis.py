"""The analysis as a whole: drift against what the pruned model really caches, batches, going on, plots."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from transformers import DynamicCache

import stageprune as sp
from helpers import CACHE, InFloat64, close, in_float64, surface, tokens
from reference.prefill_oracle import layers_of
from stageprune.evaluate.analysis import analyze
from stageprune.evaluate.drift import measure_drift
from stageprune.evaluate.fingerprint import fingerprint
from stageprune.prefill.fisher import Sequences
from stageprune.prefill.gates import VirtualGates
from stageprune.prefill.importance import DRIFTS, Importance, SampleScore
from zoo import ARCHITECTURES, BY_NAME

PROMPTS = [tokens(1, length, seed=length)[0].tolist() for length in (9, 5, 7, 6, 8)]
RESPONSES = [tokens(1, length, seed=length)[0].tolist() for length in (4, 6, 1, 3, 5)]
SKIPPED = (4, 5)
ARGUMENTS: dict[str, Any] = dict(response_tokens=4, seed=0, skipped=SKIPPED)


def states(model: Any, skipped: tuple[int, ...], row: int) -> dict[str, list[torch.Tensor]]:
    """What a cache and hooks see of one sample, for the last layers; pruned if layers are skipped."""
    prompt, response = PROMPTS[row], RESPONSES[row]
    ids, last = torch.tensor([prompt + response[:-1]]), len(prompt) - 1
    cache, attention = DynamicCache(), {}

    def keep(index: int) -> Any:
        def hook(module: Any, args: Any, output: Any) -> None:
            attention[index] = output[0]

        return layers_of(model)[index].self_attn.register_forward_hook(hook)

    method = sp.PrefillOnlyPruning(layers=skipped)
    with torch.no_grad(), sp.prune(model, method) as handle, handle.stage(prefill=last if skipped else 0):
        hooks = [keep(index) for index in SKIPPED]
        model(ids, logits_to_keep=len(response), **{CACHE: cache})
    for hook in hooks:
        hook.remove()
    heads = {
        what: [getattr(cache.layers[i], what)[:, :, :last].transpose(1, 2).flatten(2) for i in SKIPPED]
        for what in ("keys", "values")
    }
    return heads | {"attention": [attention[i][:, -len(response) :] for i in SKIPPED]}


def test_drift_is_what_the_pruned_model_caches_and_attends_to() -> None:
    model = BY_NAME["llama"].build()
    with in_float64(model), VirtualGates(model) as gates:
        ours = measure_drift(gates, Sequences.of(PROMPTS, RESPONSES), SKIPPED)
    for row in range(len(PROMPTS)):
        with InFloat64():
            full, pruned = states(model, (), row), states(model, SKIPPED, row)
        for place in range(len(SKIPPED)):
            for what in ("keys", "values", "attention"):
                expected = F.cosine_similarity(full[what][place], pruned[what][place], dim=-1).mean().item()
                assert getattr(ours[row], what)[place] == pytest.approx(expected, rel=1e-9), (row, what)
        # In the pruned model every skipped layer is entered by what enters the first.
        with torch.no_grad(), InFloat64():
            sequence = torch.tensor([PROMPTS[row] + RESPONSES[row][:-1]])
            entering = model(sequence, output_hidden_states=True, use_cache=False).hidden_states
        last = len(PROMPTS[row]) - 1
        both = [entering[layer][0, :last] for layer in SKIPPED]
        expected = F.cosine_similarity(*both, dim=-1).mean().item()
        assert ours[row].hidden_states == pytest.approx((1.0, expected), rel=1e-9)
        assert ours[row].keys[0] == pytest.approx(1, rel=1e-12)
        assert ours[row].values[1] < 0.999


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_family_is_analyzed(architecture: Any) -> None:
    (score,) = analyze(architecture.build(torch.float32), PROMPTS[:1], batch=1, **ARGUMENTS)
    assert len(score.prefill) == len(score.decode) == 6
    assert score.response_tokens == 4
    for what in DRIFTS:
        first, second = getattr(score.drift, what)
        assert first == pytest.approx(1, abs=1e-5)
        assert -1 <= second < 1


def numbers(score: SampleScore) -> torch.Tensor:
    parts = [getattr(score.drift, what) for what in DRIFTS]
    return torch.tensor([score.loss, *score.prefill, *score.decode, *sum(parts, ())], dtype=torch.float64)


def test_the_model_is_left_as_it_was() -> None:
    model = BY_NAME["gemma3"].build(torch.float32)
    before, state = surface(model), {name: value.clone() for name, value in model.state_dict().items()}
    analyze(model, PROMPTS, batch=2, **ARGUMENTS)
    assert surface(model) == before
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_batches_change_rounding_only_and_earlier_scores_are_kept() -> None:
    model = BY_NAME["qwen3"].build()
    with in_float64(model):
        calls: list[tuple[SampleScore, ...]] = []
        together = analyze(model, PROMPTS, batch=2, on_batch=calls.append, **ARGUMENTS)
        alone = analyze(model, PROMPTS, batch=1, **ARGUMENTS)
        resumed = analyze(model, PROMPTS, batch=2, done=calls[0], **ARGUMENTS)
    assert [len(scores) for scores in calls] == [2, 4, 5]
    assert resumed == together, "bit for bit"
    for one, other in zip(together, alone, strict=True):
        assert (one.index, one.prompt_tokens, one.response_tokens) == (other.index, other.prompt_tokens, 4)
        assert close(numbers(one), numbers(other)) < 1e-10


def test_no_layer_skipped_means_no_drift() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    scores = analyze(model, PROMPTS[:2], batch=2, response_tokens=3, seed=0, skipped=())
    result = Importance({}, {}, scores)
    assert list(result.drift_layers) == []
    assert result.to_dict()["drift"] == []


def test_an_overflow_is_an_error() -> None:
    model = BY_NAME["llama"].build(torch.float32)
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.inf)
    with pytest.raises(sp.NumericsError, match="sample 0 are not finite"):
        analyze(model, PROMPTS[:1], batch=1, **ARGUMENTS)


def test_the_fingerprint_tells_models_apart() -> None:
    model, same = BY_NAME["llama"].build(torch.float32), BY_NAME["llama"].build(torch.float32)
    assert fingerprint(model) == fingerprint(same)
    assert fingerprint(BY_NAME["llama"].build(torch.bfloat16)) != fingerprint(model)
    with torch.no_grad():
        same.model.layers[3].mlp.up_proj.weight.view(-1)[0] += 1e-3
    assert fingerprint(model) != fingerprint(same)
    other = BY_NAME["llama"].build(torch.float32)
    other.config.rms_norm_eps = 0.5
    assert fingerprint(model) != fingerprint(other)


@pytest.fixture(scope="module")
def result() -> Importance:
    model = BY_NAME["llama"].build(torch.float32)
    return Importance({"name": "tiny"}, {"data": "x"}, analyze(model, PROMPTS, batch=5, **ARGUMENTS))


@pytest.mark.parametrize("name", ["p.svg", "P.PNG"])
def test_plots(result: Importance, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    from stageprune.evaluate.importance_plot import plot_importance

    plot_importance(result, tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(b"\x89PNG" if name.lower().endswith("png") else b"<?xml")
    plot_importance(result, tmp_path / name)
    assert (tmp_path / name).read_bytes() == content
    single = dataclasses.replace(result, samples=result.samples[:1], _estimates={})
    plot_importance(single, tmp_path / name)


def test_plots_that_cannot_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stageprune.evaluate.figure import check_figure

    with pytest.raises(sp.SettingError, match=r"\.png, \.svg, \.pdf"):
        check_figure(tmp_path / "p.jpg")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(sp.SettingError, match=r"stageprune\[plots\]"):
        check_figure(tmp_path / "p.png")
