"""What all baselines owe: round trips, the dense model back, every way to generate, clear refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stageprune as sp
from helpers import close, left_padded, surface, tokens
from stageprune.baselines import BASELINES, LayerDropping, ShortGPT, SliceGPT, Wanda, WandaSp
from stageprune.evaluate.quality import answer_logits, closeness, dense_cases
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")

TEXTS = [tokens(1, 20, seed).tolist()[0] for seed in (5, 6)]
NAMES = ["llama", "llama-bias", "mistral", "qwen2", "qwen3"]
METHODS = {name: kind() for name, kind in BASELINES.items()}
every_baseline = pytest.mark.parametrize("name", METHODS)


def built(name: str = "qwen2") -> Any:
    return BY_NAME[name].build()


@every_baseline
def test_settings_round_trip(name: str) -> None:
    method = METHODS[name]
    assert type(method).from_json(method.to_json()) == method
    assert method.to_dict()["method"] == name
    with pytest.raises(sp.SettingError, match="ratio must"):
        type(method)(ratio=1.5)


@every_baseline
@pytest.mark.parametrize("architecture", NAMES)
@torch.no_grad()
def test_dense_within_and_after(architecture: str, name: str) -> None:
    model, ids = built(architecture), tokens(2, 11)
    before, state = model(ids).logits, surface(model)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with sp.prune(model, METHODS[name], calibration=TEXTS) as handle:
        pruned = model(ids).logits
        assert pruned.shape == before.shape
        assert close(pruned, before) > 1e-6, "nothing was pruned"
        with handle.dense():
            assert torch.equal(model(ids).logits, before)
        assert close(model(ids).logits, pruned) == 0
        assert sp.handle_of(model) is handle
    assert torch.equal(model(ids).logits, before)
    assert surface(model) == state
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@every_baseline
@torch.no_grad()
def test_generation_is_what_whole_passes_say(name: str) -> None:
    """Padded prompts, greedy: every token is the likeliest of a pass over the whole sequence, without a cache."""
    model = built()
    ids, mask = (
        left_padded([12, 7]) if name != "probe-pruning" else (tokens(1, 12), torch.ones(1, 12, dtype=torch.long))
    )
    with sp.prune(model, METHODS[name], calibration=TEXTS) as handle:
        sequences = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        new = torch.ones(len(ids), 4, dtype=torch.long)
        whole = torch.cat((mask, new), 1)
        with handle.stage(prefill=11):
            logits = model(
                sequences[:, :-1],
                attention_mask=whole,
                position_ids=(whole.cumsum(-1) - 1).clamp(min=0),
                use_cache=False,
                logits_to_keep=5,
            ).logits
        assert torch.equal(logits.argmax(-1), sequences[:, 12:])
        beams = model.generate(ids, attention_mask=mask, max_new_tokens=5, num_beams=3, do_sample=False)
        assert beams.shape[0] == len(ids)


@every_baseline
@torch.no_grad()
def test_quality_is_measured_as_for_the_methods(name: str) -> None:
    model = built()
    cases = dense_cases(model, [tokens(1, 9).tolist()[0]], 4)
    with sp.prune(model, METHODS[name], calibration=TEXTS) as handle:
        quality = closeness(handle, cases)
        logits = answer_logits(handle, cases[0].prompt, cases[0].answer)
    assert logits.shape[1] == 4
    assert quality.kl > 0
    assert quality.tokens == 4


@torch.no_grad()
def test_reports_count_what_is_saved() -> None:
    """By hand: 4 of 6 layers; 48 channels to 36 of gate, up and down; nothing of a mask."""
    model = built()
    with sp.prune(model, LayerDropping(1 / 3)) as handle:
        report = handle.report(10)
        linear = sum(parameter.numel() for parameter in model.model.layers[0].parameters() if parameter.ndim == 2)
        pairs = 55 * 2 * 32
        assert report.dense_flops - report.pruned_flops == 2 * (2 * (10 * linear + pairs))
        assert report.skipped_layers == (4, 5)
        assert report.ideal_decode_speedup > 1.3
    with sp.prune(model, WandaSp(mlp_ratio=0.25), calibration=TEXTS) as handle:
        report = handle.report(10)
        assert report.dense_flops - report.pruned_flops == 2 * 10 * 6 * 3 * 32 * 12
        assert report.dense_step_values - report.pruned_step_values == 6 * 3 * 32 * 12
    with sp.prune(model, Wanda(0.5), calibration=TEXTS) as handle:
        assert handle.report(10).ideal_speedup == 1
    with sp.prune(model, SliceGPT(0.25), calibration=TEXTS) as handle:
        report = handle.report(10)
        weights = [
            parameter.numel() for layer in model.model.layers for parameter in layer.parameters() if parameter.ndim == 2
        ]
        saved = sum(weights) // 4 - 6 * 2 * 24 * 24
        assert report.dense_step_values - report.pruned_step_values == saved + model.lm_head.weight.numel() // 4
        assert report.dense_flops - report.pruned_flops == 2 * 10 * saved + 2 * model.lm_head.weight.numel() // 4


@pytest.mark.parametrize(
    ("methods", "calibration", "says"),
    [
        ((ShortGPT(),), None, "needs calibration="),
        ((ShortGPT(),), [], "needs calibration="),
        ((ShortGPT(),), [[1]], "two token ids or more"),
        ((ShortGPT(),), ["text"], "two token ids or more"),
        ((ShortGPT(),), [[1, "2"]], "integers of at least 0"),
        ((ShortGPT(), sp.PrefillOnlyPruning()), TEXTS, "cannot be combined"),
        ((LayerDropping(layers=range(6)),), None, "keep one at least"),
        ((WandaSp(protect=[9]),), TEXTS, "protect names layer 9"),
    ],
    ids=["none", "empty", "short", "text", "words", "combined", "all", "protect"],
)
def test_wrong_calls(methods: Any, calibration: Any, says: str) -> None:
    model = built()
    before = surface(model)
    with pytest.raises(sp.SettingError, match=says):
        sp.prune(model, *methods, calibration=calibration)
    assert surface(model) == before


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        *[("mixtral", name) for name in ("wanda-sp", "slicegpt", "wanda")],
        *[(name, "slicegpt") for name in ("gemma2", "gpt-neox", "cohere")],
        ("gemma3", "layer-dropping"),
    ],
)
def test_models_of_another_shape(architecture: str, name: str) -> None:
    model = built(architecture)
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError):
        sp.prune(model, METHODS[name], calibration=TEXTS)
    assert surface(model) == before
    sp.prune(model, sp.PrefillOnlyPruning(1 / 2)).remove()
