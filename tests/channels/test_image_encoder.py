"""Segment Anything: image in, mask out, by the prompt's part of channel pruning."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import stageprune as sp
from helpers import close
from reference import image_encoder as ref
from sam_zoo import build, images


@pytest.mark.parametrize("kind", ["Sam", "SamHQ"])
@pytest.mark.parametrize("scope", ["batch", "sequence"])
@pytest.mark.parametrize(("rule", "kept"), [("candidates", 24), ("budget", 20)])
@torch.no_grad()
def test_masks_equal_the_reference(kind: str, scope: str, rule: str, kept: int) -> None:
    """r 0.5, gamma 0.2 of 40 channels: 24 are retained or candidates, 20 are the budget."""
    model, inputs = build(kind), images()
    method = sp.OnlineChannelPruning(mlp_ratio=0.5, partition_fraction=0.2, scope=scope, prefill=rule, protect=[2])
    with ref.pruned(model.vision_encoder.layers, {0: kept, 1: kept}, together=scope == "batch"):
        expected = model(**inputs).pred_masks
    dense = model(**inputs).pred_masks
    with sp.prune(model, method) as handle:
        ours = model(**inputs).pred_masks
        with handle.dense():
            assert torch.equal(model(**inputs).pred_masks, dense)
    assert close(ours, expected) < 1e-10
    assert close(ours, dense) > 1e-4, "nothing was pruned"


@pytest.mark.parametrize("scope", ["batch", "sequence"])
@torch.no_grad()
def test_an_image_does_not_depend_on_its_batch_where_it_is_asked_not_to(scope: str) -> None:
    model, inputs = build(), images(3)
    with sp.prune(model, sp.OnlineChannelPruning(mlp_ratio=0.6, scope=scope)):
        together = model(**inputs).pred_masks
        alone = torch.cat([model(**{k: v[i : i + 1] for k, v in inputs.items()}).pred_masks for i in range(3)])
    assert (close(together, alone) < 1e-10) == (scope == "sequence")


@torch.no_grad()
def test_the_encoder_alone_and_the_overall_ratio() -> None:
    """A ViT layer: 4 d^2 weights of attention beside 2 d h of the FFN; 20 % of all are 36 % of the FFN here."""
    model = build()
    encoder, pixels = model.vision_encoder, images()["pixel_values"]
    ratio = 0.2 * (4 * 16 * 16 + 2 * 16 * 40) / (2 * 16 * 40)
    kept = 40 - round((ratio - 0.05) * 40)
    with ref.pruned(encoder.layers, dict.fromkeys(range(3), kept), together=True):
        expected = encoder(pixels).last_hidden_state
    with sp.prune(encoder, sp.OnlineChannelPruning(0.2)) as handle:
        assert close(encoder(pixels).last_hidden_state, expected) < 1e-10
        assert handle.report().kept == dict.fromkeys(range(3), kept)


@torch.no_grad()
def test_detached_is_the_original() -> None:
    model, inputs = build(), images()
    before = model(**inputs).pred_masks
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    handle = sp.prune(model, sp.OnlineChannelPruning(0.4))
    assert sp.handle_of(model) is handle
    assert handle.attached
    model(**inputs)
    with pytest.raises(sp.AlreadyPrunedError):
        sp.prune(model.vision_encoder, sp.OnlineChannelPruning(0.2))
    handle.remove()
    handle.remove()
    assert sp.handle_of(model) is None
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(**inputs).pred_masks, before)


@torch.no_grad()
def test_the_report_counts_what_runs() -> None:
    model, pixels = build(attn="eager"), images(1)["pixel_values"]  # torch does not count its kernel for the CPU
    with sp.prune(model, sp.OnlineChannelPruning(mlp_ratio=0.6)) as handle:
        report = handle.report()
        with FlopCounterMode(display=False) as counter:
            model.vision_encoder(pixels)
        pruned = counter.get_total_flops()
        with handle.dense(), FlopCounterMode(display=False) as counter:
            model.vision_encoder(pixels)
    assert (report.dense_flops, report.pruned_flops) == (counter.get_total_flops(), pruned)
    assert report.dense_flops - report.pruned_flops == 2 * 64 * 3 * 16 * (40 - 18)
    assert report.to_dict()["ideal_speedup"] == report.ideal_speedup > 1
    assert "3 of 3 FFNs" in str(report)


@pytest.mark.parametrize(
    ("method", "says"),
    [
        (sp.OnlineChannelPruning(0.2, selection="fixed"), "selection='fixed' is about generated tokens"),
        (sp.OnlineChannelPruning(0.2, refresh=4), "refresh=4 is about generated tokens"),
        (sp.OnlineChannelPruning(0.2, unseen="layer"), "unseen='layer' is about routed experts"),
        (sp.OnlineChannelPruning(0.2, prefill="dense"), "prunes generated tokens alone"),
        (sp.OnlineChannelPruning(0.2, ratios=[0.1]), "ratios lists 1 layers, but the encoder has 3"),
        (sp.OnlineChannelPruning(0.2, protect=[3]), "protect names layer 3"),
        (sp.PrefillOnlyPruning(1 / 3), "image encoder without keys and values"),
    ],
    ids=["selection", "refresh", "unseen", "dense", "ratios", "protect", "prefill-only"],
)
def test_what_an_image_encoder_cannot_have(method: Any, says: str) -> None:
    model = build()
    state = {name: set(vars(module)) for name, module in model.named_modules()}
    with pytest.raises(sp.StagePruneError, match=says):
        sp.prune(model, method)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == state


def test_training_mode_and_stages() -> None:
    model = build()
    with pytest.raises(sp.UnsupportedModelError, match="training mode"):
        sp.prune(model.train(), sp.OnlineChannelPruning(0.2))
    with sp.prune(model.eval(), sp.OnlineChannelPruning(0.2)) as handle, pytest.raises(sp.StageError):
        handle.stage(prefill=3)


def test_an_ffn_that_computes_something_else() -> None:
    model = build()
    mlp = model.vision_encoder.layers[1].mlp
    own = type(mlp).forward
    mlp.forward = lambda x: 1.01 * own(mlp, x)
    with pytest.raises(sp.UnsupportedModelError, match="layer 1"):
        sp.prune(model, sp.OnlineChannelPruning(0.2))
