"""Vision-language models against the oracles: images, videos, text, and batches that mix them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import stageprune as sp
from helpers import RENAMED, close, exact_logits, log_probability, three_beams
from reference import vision as ref
from reference.prefill_oracle import gated_logits
from stageprune.families import decoder
from vlm_zoo import PROMPTS, VISION_BY_NAME, VISION_MODELS, VisionModel, prompts_of

pytestmark = pytest.mark.usefixtures("everything_in_float64")

NAMES = list(VISION_BY_NAME)
CHOICES = [(2, 3), (0,), (1,), (0, 1), (1, 2), (0, 2), (0, 1, 2, 3)]
"""DeepStack adds features after the first two layers of the Qwen3-VL here."""
CHANNELS = sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3)


@cache
def built(name: str) -> Any:
    """Shared between tests: pruned and given back."""
    return VISION_BY_NAME[name].build()


def generated(model: Any, inputs: dict[str, torch.Tensor], new_tokens: int, **options: Any) -> tuple[Any, torch.Tensor]:
    with exact_logits(model) as logits:
        sequences = model.generate(**inputs, **(dict(do_sample=False, max_new_tokens=new_tokens) | options))
    return sequences, torch.stack(logits[-new_tokens:], dim=1)


def all_prompts() -> list[object]:
    return [
        pytest.param(model, name, id=f"{model.name}-{name.replace(' ', '-')}")
        for model in VISION_MODELS
        for name in prompts_of(model)
    ]


@pytest.mark.parametrize(("kind", "prompts"), all_prompts())
@torch.no_grad()
def test_every_kind_of_prompt(kind: VisionModel, prompts: str) -> None:
    model = built(kind.name)
    inputs = kind.inputs(model, prompts_of(kind)[prompts])
    expected, logits = ref.greedy(model, inputs, 3, (2, 3))
    with sp.prune(model, sp.PrefillOnlyPruning(layers=(2, 3))):
        sequences, ours = generated(model, inputs, 3)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@torch.no_grad()
def test_every_choice_of_layers(name: str, attn: str) -> None:
    model = built(name)
    inputs = VISION_BY_NAME[name].inputs(model, PROMPTS["mixed"])
    model.set_attn_implementation(attn)
    try:
        for layers in CHOICES:
            expected, logits = ref.greedy(model, inputs, 2, layers)
            with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)):
                sequences, ours = generated(model, inputs, 2)
            assert torch.equal(sequences, expected), layers
            assert close(ours, logits) < 1e-10, layers
    finally:
        model.set_attn_implementation("eager")


@torch.no_grad()
def test_deepstack_reaches_the_last_layer_of_a_shallow_model() -> None:
    """Two layers, features behind both: the model itself writes to all rows behind the last layer."""
    kind = VISION_BY_NAME["qwen3-vl"]
    model = kind.build(num_hidden_layers=2)
    inputs = kind.inputs(model, PROMPTS["mixed"])
    for layers in ((0,), (1,), (0, 1)):
        _, logits = ref.greedy(model, inputs, 2, layers)
        with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)):
            assert close(generated(model, inputs, 2)[1], logits) < 1e-10


@torch.no_grad()
def test_deepstack_of_an_unknown_place_may_be_behind_any_layer(monkeypatch) -> None:
    kind = VISION_BY_NAME["qwen3-vl"]
    model = built(kind.name)
    inputs = kind.inputs(model, PROMPTS["mixed"])
    _, logits = ref.greedy(model, inputs, 2, (1, 2, 3))
    known = decoder._whole
    monkeypatch.setattr(decoder, "_whole", lambda body, config, count: known(body, object(), count))
    assert decoder.find_decoder(model).whole == {0, 1, 2, 3}
    with sp.prune(model, sp.PrefillOnlyPruning(layers=(1, 2, 3))):
        assert close(generated(model, inputs, 2)[1], logits) < 1e-10


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_images_among_the_decode_rows(name: str) -> None:
    """The caller says where decoding starts: here within an image, which Gemma-3 attends to in both directions."""
    model = built(name)
    inputs = VISION_BY_NAME[name].inputs(model, PROMPTS["mixed"])
    length = inputs["input_ids"].shape[1]
    whole = ref.whole(inputs, inputs["input_ids"])
    for layers in ((2, 3), (0, 2)):
        reference = gated_logits(model, layers, length - 5, **whole)[:, -5:]
        with sp.prune(model, sp.PrefillOnlyPruning(layers=layers)) as handle, handle.stage(prefill=length - 5):
            output = model(**whole, logits_to_keep=5, use_cache=True)
        assert close(output.logits, reference) < 1e-10, layers


# A choice of channels for the whole batch would make a sequence's score depend on the other beams.
ALONE = replace(CHANNELS, scope="sequence")
METHODS = {
    "prefill": (sp.PrefillOnlyPruning(layers=(2, 3)),),
    "channels": (ALONE,),
    "both": (sp.PrefillOnlyPruning(layers=(2, 3)), ALONE),
}


def reference_logits(model: Any, methods: str, inputs: dict[str, torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """Of the new tokens."""
    skipped = () if methods == "channels" else (2, 3)
    channels = None if methods == "prefill" else ALONE
    return ref.logits_of(model, inputs, tokens, skipped, channels)[:, inputs["input_ids"].shape[1] - 1 : -1]


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_sampled_sequences(name: str, methods: str) -> None:
    model = built(name)
    inputs = VISION_BY_NAME[name].inputs(model, PROMPTS["mixed"])
    torch.manual_seed(0)
    with sp.prune(model, *METHODS[methods]):
        sequences, ours = generated(model, inputs, 3, do_sample=True, top_k=0)
    assert close(ours, reference_logits(model, methods, inputs, sequences)) < 1e-10


@pytest.mark.parametrize("methods", METHODS)
@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_beams_are_scored_by_the_pruned_model(name: str, methods: str) -> None:
    """Every beam's score is the oracle's log-probability of its tokens."""
    model = built(name)
    # transformers before 5.24 mixes up which image belongs to which beam when prompts have several or none.
    inputs = VISION_BY_NAME[name].inputs(model, PROMPTS["mixed" if RENAMED else "one image"])
    with sp.prune(model, *METHODS[methods]):
        wholes, scores = three_beams(model, inputs)
    length = inputs["input_ids"].shape[1]
    for beam in range(3):
        expected = log_probability(reference_logits(model, methods, inputs, wholes[:, beam]), wholes[:, beam, length:])
        assert close(scores[:, beam], expected) < 1e-6


@pytest.mark.parametrize(("kind", "prompts"), all_prompts())
@torch.no_grad()
def test_channels_are_ranked_by_images_and_text(kind: VisionModel, prompts: str) -> None:
    model = built(kind.name)
    inputs = kind.inputs(model, prompts_of(kind)[prompts])
    expected, logits = ref.greedy(model, inputs, 2, channels=CHANNELS)
    with sp.prune(model, CHANNELS):
        sequences, ours = generated(model, inputs, 2)
    assert torch.equal(sequences, expected)
    assert close(ours, logits) < 1e-10


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_both_methods(name: str) -> None:
    model = built(name)
    inputs = VISION_BY_NAME[name].inputs(model, PROMPTS["mixed"])
    for layers in ((2, 3), (0, 2)):
        expected, logits = ref.greedy(model, inputs, 2, layers, CHANNELS)
        with sp.prune(model, sp.PrefillOnlyPruning(layers=layers), CHANNELS):
            sequences, ours = generated(model, inputs, 2)
        assert torch.equal(sequences, expected)
        assert close(ours, logits) < 1e-10


@torch.no_grad()
def test_the_oracle_itself_sees_images_and_pruning() -> None:
    """Else everything above would hold for models that ignore their images, or methods that prune nothing."""
    for kind in VISION_MODELS:
        model = built(kind.name)
        inputs = kind.inputs(model, PROMPTS["one image"])
        dense = ref.logits_of(model, inputs, inputs["input_ids"])[:, -1]
        assert close(ref.logits_of(model, inputs, inputs["input_ids"], (2, 3))[:, -1], dense) > 1e-4, kind.name
        assert close(ref.logits_of(model, inputs, inputs["input_ids"], (), CHANNELS)[:, -1], dense) > 1e-4, kind.name
        other = dict(inputs) | {"pixel_values": -inputs["pixel_values"]}
        assert close(ref.logits_of(model, other, inputs["input_ids"])[:, -1], dense) > 1e-4, kind.name
