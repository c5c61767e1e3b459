"""Each baseline against its definition, written out or in a closed form."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import stageprune as sp
from helpers import close, tokens
from reference import baselines as ref
from stageprune.baselines import (
    FLAP,
    LayerDropping,
    Magnitude,
    ProbePruning,
    RandomChannels,
    ShortGPT,
    SliceGPT,
    Wanda,
    WandaSp,
)
from stageprune.baselines.shortgpt import block_influence
from stageprune.baselines.slicegpt import principal_components
from stageprune.families.decoder import find_decoder
from zoo import BY_NAME

pytestmark = pytest.mark.usefixtures("everything_in_float64")

TEXTS = [tokens(1, length, seed).tolist()[0] for length, seed in ((20, 5), (13, 6))]
IDS = tokens(2, 11)


def built(name: str = "qwen2") -> Any:
    return BY_NAME[name].build()


@torch.no_grad()
def test_dropped_layers_are_as_if_they_were_not_there() -> None:
    model = built()
    layers = model.model.layers
    model.model.layers = torch.nn.ModuleList([layers[index] for index in (1, 3, 4)])
    expected = model(IDS, use_cache=False).logits
    model.model.layers = layers
    with sp.prune(model, LayerDropping(layers=[0, 2, 5])):
        assert close(model(IDS).logits, expected) < 1e-12
        cached = model.generate(IDS, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
    assert len([layer for layer in cached.past_key_values.layers if layer.get_seq_length()]) == 3


@torch.no_grad()
def test_block_influence_by_hand() -> None:
    model = built()
    expected = ref.block_influence(model, TEXTS)
    ours = block_influence(find_decoder(model), TEXTS)
    assert ours == pytest.approx(expected, abs=1e-12)
    least = sorted(sorted(range(6), key=lambda index: expected[index])[:2])
    with sp.prune(model, ShortGPT(0.34), calibration=TEXTS) as handle:
        assert list(handle.report().skipped_layers) == least


CHANNELS = {"magnitude": Magnitude, "wanda-sp": WandaSp, "flap": FLAP}


@pytest.mark.parametrize("kind", CHANNELS)
@torch.no_grad()
def test_channels_by_hand(kind: str) -> None:
    """48 channels, 30 % away: 34 stay, the best by the score written out; FLAP with the means of the others."""
    model = built()
    own = dict(structure="layer") if kind == "flap" else {}
    kept, biases = {}, {}
    for index in range(6):
        scores = ref.channel_scores(model, kind, [] if kind == "magnitude" else TEXTS, index)
        order = sorted(range(48), key=lambda channel: -scores[channel])
        kept[index] = order[:34]
        if kind == "flap":
            means = ref.activations(model, index, ref.ffn_inputs(model, TEXTS, index)).mean(0)
            weight = model.model.layers[index].mlp.down_proj.weight
            biases[index] = sum(weight[:, channel] * means[channel] for channel in order[34:])
    expected = ref.logits_with_channels(model, kept, biases, IDS)
    with sp.prune(model, CHANNELS[kind](mlp_ratio=0.3, **own), calibration=TEXTS):
        assert close(model(IDS).logits, expected) < 1e-10


@torch.no_grad()
def test_flap_compares_standardised_scores_of_all_layers() -> None:
    model = built()
    standard = {}
    for index in range(6):
        scores = torch.tensor(ref.channel_scores(model, "flap", TEXTS, index), dtype=torch.float64)
        standard |= {(index, c): float(v) for c, v in enumerate((scores - scores.mean()) / scores.std())}
    best = sorted(standard, key=lambda place: -standard[place])[: 6 * 34]
    kept = {index: [channel for layer, channel in best if layer == index] for index in range(6)}
    assert len({len(channels) for channels in kept.values()}) > 1
    expected = ref.logits_with_channels(model, kept, {}, IDS)
    with sp.prune(model, FLAP(mlp_ratio=0.3, compensate=False), calibration=TEXTS):
        assert close(model(IDS).logits, expected) < 1e-10


@torch.no_grad()
def test_flap_makes_up_exactly_for_channels_that_never_change() -> None:
    """A gate without weights and with a bias, times an up projection of the same kind: constant activations."""
    model = built("llama-bias")
    for layer in model.model.layers:
        for projection in (layer.mlp.gate_proj, layer.mlp.up_proj):
            projection.weight[:20] = 0
            projection.bias[:20] = torch.linspace(0.5, 1.5, 20)
    before = model(IDS).logits
    with sp.prune(model, FLAP(mlp_ratio=20 / 48, structure="layer"), calibration=TEXTS):
        assert close(model(IDS).logits, before) < 1e-10
    with sp.prune(model, FLAP(mlp_ratio=20 / 48, structure="layer", compensate=False), calibration=TEXTS):
        assert close(model(IDS).logits, before) > 1e-3


@torch.no_grad()
def test_random_channels_are_a_matter_of_the_seed() -> None:
    model = built()
    found = []
    for seed in (0, 0, 1):
        with sp.prune(model, RandomChannels(mlp_ratio=0.5, seed=seed)) as handle:
            assert handle.report(1).dense_step_values - handle.report(1).pruned_step_values == 6 * 3 * 32 * 24
            found.append(model(IDS).logits)
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@torch.no_grad()
def test_wanda_by_a_loop() -> None:
    model = built()
    inputs: dict[str, list[torch.Tensor]] = {}
    linears = {
        f"{index}.{name}": module
        for index, layer in enumerate(model.model.layers)
        for name, module in layer.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    hooks = [
        module.register_forward_pre_hook(lambda m, args, name=name: inputs.setdefault(name, []).append(args[0][0]))
        for name, module in linears.items()
    ]
    for text in TEXTS:
        model(torch.tensor([text]), use_cache=False)
    for hook in hooks:
        hook.remove()
    expected = {
        name: module.weight * ref.wanda_mask(module.weight, torch.cat(inputs[name]).square().sum(0).sqrt(), 0.4)
        for name, module in linears.items()
    }
    with sp.prune(model, Wanda(0.4), calibration=TEXTS) as handle:
        assert all(torch.equal(module.weight, expected[name]) for name, module in linears.items())
        with handle.dense():
            assert not any(torch.equal(module.weight, expected[name]) for name, module in linears.items())


@torch.no_grad()
def test_nothing_cut_is_the_dense_model() -> None:
    for name in ("llama", "llama-bias", "qwen2", "qwen3", "mistral"):
        model = built(name)
        before = model(IDS).logits
        with sp.prune(model, SliceGPT(0.0, multiple=1), calibration=TEXTS):
            assert close(model(IDS).logits, before) < 1e-9, name


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@torch.no_grad()
def test_slicing_is_projecting_in_the_original_basis(name: str) -> None:
    """Norms keep the size of the whole stream in mind, of which the cut components count as zero."""
    model = built(name)
    bases = [basis[:, :24] for basis in principal_components(find_decoder(model), TEXTS)]
    expected = ref.sliced_logits(model, bases, IDS)
    with sp.prune(model, SliceGPT(0.25), calibration=TEXTS):
        assert close(model(IDS, use_cache=False).logits, expected) < 1e-9


@torch.no_grad()
def test_components_are_orthogonal_and_the_largest_first() -> None:
    model = built()
    norm = model.model.layers[2].post_attention_layernorm
    rows: list[torch.Tensor] = []
    hook = norm.register_forward_pre_hook(lambda module, args: rows.append(args[0][0]))
    for text in TEXTS:
        model(torch.tensor([text]), use_cache=False)
    hook.remove()
    signals = torch.cat([row / (row.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt() for row in rows])
    basis = principal_components(find_decoder(model), TEXTS)[5]
    assert close(basis.T @ basis, torch.eye(32, dtype=torch.float64)) < 1e-12
    along = (signals @ basis).square().sum(0)
    assert close(along, along.sort(descending=True).values) < 1e-12
    assert float(along.sum()) == pytest.approx(float(signals.square().sum()))


@pytest.mark.parametrize("history", [False, True])
@torch.no_grad()
def test_a_probe_of_the_whole_prompt_by_hand(history: bool) -> None:
    """In one layer; the rows before the last prompt token choose, and all rows go by the choice."""
    model = built()
    ids = tokens(1, 11)
    inputs: list[torch.Tensor] = []
    hook = model.model.layers[2].mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    model(ids)
    hook.remove()
    energy = ref.activations(model, 2, inputs[0][:8]).square().mean(0)
    if history:
        past = ref.activations(model, 2, ref.ffn_inputs(model, TEXTS, 2)).square().mean(0)
        energy = energy / (energy + past) * energy + past / (energy + past) * past
    weight = model.model.layers[2].mlp.down_proj.weight
    scores = [float(((weight[:, c] ** 2 * energy[c]) ** 2).sum() ** 0.5) for c in range(48)]
    kept = sorted(range(48), key=lambda channel: -scores[channel])[:29]
    expected = ref.logits_with_channels(model, {2: kept}, {}, ids)
    method = ProbePruning(mlp_ratio=0.4, probe=1, protect=[0, 1, 3, 4, 5])
    with sp.prune(model, method, calibration=TEXTS if history else None) as handle, handle.stage(prefill=8):
        assert close(model(ids, logits_to_keep=3).logits, expected[:, 8:]) < 1e-10


@torch.no_grad()
def test_the_probe_takes_the_rows_with_the_largest_norms() -> None:
    model = built()
    inputs: list[torch.Tensor] = []
    hook = model.model.layers[0].mlp.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    ids = tokens(1, 12)
    model(ids)
    hook.remove()
    rows = inputs[0]
    best = sorted(range(12), key=lambda row: -float(rows[row].norm()))[:3]
    energy = ref.activations(model, 0, rows[best]).square().mean(0)
    weight = model.model.layers[0].mlp.down_proj.weight
    scores = [float((weight[:, c] ** 4).sum() ** 0.5 * energy[c]) for c in range(48)]
    kept = sorted(range(48), key=lambda channel: -scores[channel])[:24]
    expected = ref.logits_with_channels(model, {0: kept}, {}, ids)
    with sp.prune(model, ProbePruning(mlp_ratio=0.5, probe=0.25, protect=[1, 2, 3, 4, 5])):
        assert close(model(ids).logits, expected) < 1e-10
