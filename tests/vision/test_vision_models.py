"""Vision-language models as a whole: taken apart, given back, refused, continued, and in figures."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import DynamicCache, StaticCache

import stageprune as sp
from helpers import CACHE, RENAMED, InFloat64, close, exact_logits, surface, tokens
from reference import vision as ref
from reference.prefill_oracle import gated_logits
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import find_decoder
from stageprune.families.verify import verify_layers
from vlm_zoo import PROMPTS, VISION_BY_NAME, VISION_MODELS, VisionModel

METHODS = (sp.PrefillOnlyPruning(layers=(2, 3)), sp.OnlineChannelPruning(mlp_ratio=0.4, partition_fraction=0.3))

every_model = pytest.mark.parametrize("kind", VISION_MODELS, ids=lambda kind: kind.name)


def encoder_parts(model: Any) -> list[torch.nn.Module]:
    """All modules outside the language model and its head."""
    decoder = find_decoder(model)
    inside = {id(part) for part in [*decoder.body.modules(), model.lm_head]}
    return [part for part in model.modules() if id(part) not in inside]


@every_model
def test_the_language_model_is_found_and_the_encoder_left_alone(kind: VisionModel) -> None:
    model = kind.build(torch.float32)
    decoder = find_decoder(model)
    assert len(decoder.layers) == 4
    assert "Vision" not in type(decoder.body).__name__
    outside = encoder_parts(model)
    before = [dict(vars(part)) for part in outside if part is not model]
    with sp.prune(model, *METHODS):
        assert [dict(vars(part)) for part in outside if part is not model] == before
        assert "forward" in vars(decoder.layers[3])


@every_model
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_layer_is_verified(kind: VisionModel, dtype: torch.dtype) -> None:
    assert sorted(verify_layers(find_decoder(kind.build(dtype)), range(4))) == [0, 1, 2, 3]


@every_model
@torch.no_grad()
def test_a_detached_model_is_the_original_bit_for_bit(kind: VisionModel) -> None:
    model = kind.build(torch.float32)
    inputs = kind.inputs(model, PROMPTS["mixed"])
    dense = model(**inputs).logits  # the first call installs hooks of transformers' own
    before = surface(model)
    features: list[torch.Tensor] = []
    body = find_decoder(model).body
    hook = body.register_forward_pre_hook(
        lambda module, args, kwargs: features.append(kwargs.get("inputs_embeds")), with_kwargs=True
    )
    model.generate(**inputs, max_new_tokens=2, do_sample=False)
    with sp.prune(model, *METHODS):
        pruned = model.generate(**inputs, max_new_tokens=1, output_logits=True, return_dict_in_generate=True)
        assert torch.equal(model(**inputs).logits, dense)  # outside generate() a forward is dense
    hook.remove()
    prompts = [part for part in features if part is not None and part.shape[1] == inputs["input_ids"].shape[1]]
    assert len(prompts) == 3  # dense, pruned, and dense outside generate()
    assert all(torch.equal(part, prompts[0]) for part in prompts)
    assert not torch.equal(pruned.logits[0], dense[:, -1])
    assert surface(model) == before
    assert torch.equal(model(**inputs).logits, dense)


def without_key_norm(attention: Any) -> None:
    """Qwen3-VL's and Gemma-3's attention, patched not to use the key norm."""
    original = attention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        norm, self.k_norm = self.k_norm, torch.nn.Identity()
        try:
            return original(*args, **kwargs)
        finally:
            self.k_norm = norm

    attention.forward = types.MethodType(forward, attention)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_missing_key_norm_is_refused_with_layer_and_difference(name: str) -> None:
    model = VISION_BY_NAME[name].build(torch.float32)
    without_key_norm(find_decoder(model).layers[3].self_attn)
    before = surface(model)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 3 \(\w+DecoderLayer\).*keys differ by up to"):
        sp.prune(model, METHODS[0])
    assert surface(model) == before


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl", "qwen3-vl"])
def test_swapped_axes_are_refused(name: str) -> None:
    """An attention that mixes up height and width: with the equal axes of plain text nobody would notice."""
    model = VISION_BY_NAME[name].build(torch.float32)
    attention = find_decoder(model).layers[3].self_attn
    original, rotary = attention.forward, find_decoder(model).body.rotary_emb

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        positions = torch.arange(hidden_states.shape[1])
        swapped = torch.stack((positions, positions // 2, positions % 3))[:, None]
        return original(hidden_states, *args, **kwargs | {"position_embeddings": rotary(hidden_states, swapped)})

    attention.forward = types.MethodType(forward, attention)
    with pytest.raises(sp.UnsupportedModelError, match=r"layer 3 .*keys differ by up to"):
        sp.prune(model, METHODS[0])


@every_model
@torch.no_grad()
def test_chunked_prefill_as_far_as_the_model_goes(kind: VisionModel) -> None:
    """What the model refuses is refused with its own words; where its own chunks add up, so do the pruned ones.

    Gemma-3's images attend in both directions, which chunks cut; before 5.24, others lose images between chunks.
    """
    model = kind.build()
    with InFloat64():
        for prompts in ("text", "one image"):
            inputs = kind.inputs(model, PROMPTS[prompts])
            refused, dense = in_chunks(model, inputs)
            with sp.prune(model, METHODS[0]):
                refused_pruned, ours = in_chunks(model, inputs)
            assert refused_pruned == refused
            if refused is None and close(dense, ref.greedy(model, inputs, 2)[1]) < 1e-10:
                assert close(ours, ref.greedy(model, inputs, 2, (2, 3))[1]) < 1e-10
            else:
                assert not RENAMED or (kind.name, prompts) == ("gemma3", "one image")


def in_chunks(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[str | None, torch.Tensor]:
    """The model's refusal, or else the logits of each new token."""
    with exact_logits(model) as logits:
        try:
            model.generate(
                **inputs,
                **{CACHE: DynamicCache(config=model.config.get_text_config())},
                max_new_tokens=2,
                do_sample=False,
                prefill_chunk_size=4,
            )
        except (ValueError, IndexError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}", torch.empty(0)
    return None, torch.stack(logits[-2:], dim=1)


@every_model
@torch.no_grad()
def test_a_static_cache(kind: VisionModel) -> None:
    model = kind.build()
    inputs = kind.inputs(model, PROMPTS["mixed"])

    def run() -> torch.Tensor:
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=48)
        sequences: torch.Tensor = model.generate(**inputs, max_new_tokens=3, do_sample=False, **{CACHE: cache})
        return sequences

    with InFloat64():
        try:
            run()
        except IndexError as error:
            pytest.skip(f"this version of transformers cannot do it without pruning, either: {error}")
        expected, _ = ref.greedy(model, inputs, 3, (2, 3))
        with sp.prune(model, METHODS[0]):
            assert torch.equal(run(), expected)


@every_model
@torch.no_grad()
def test_vision_figures(kind: VisionModel) -> None:
    """Encoder and language model together are what torch counts for the whole model."""
    model = kind.build(torch.float32)
    inputs = kind.inputs(model, PROMPTS["one image"])
    length = inputs["input_ids"].shape[1]
    with FlopCounterMode(display=False) as counter:
        model(**inputs, logits_to_keep=1)
    with sp.prune(model, *METHODS) as handle:
        deltas = getattr(model.model, "rope_deltas", None)
        report = handle.report(images={"4x4": inputs, "twice": kind.inputs(model, PROMPTS["one image"] * 2)})
        assert getattr(model.model, "rope_deltas", None) is deltas
    small, twice = report.vision
    decoder = find_decoder(model)
    assert small.dense_flops == prompt_flops(decoder, length)
    # torch counts attention over all pairs, we count those that are attended to.
    heads = 4 * getattr(decoder.config, "head_dim", 8)
    assert small.vision_flops + small.dense_flops == pytest.approx(
        counter.get_total_flops() - 4 * 4 * heads * (length**2 - length * (length + 1) // 2), rel=0.02
    )
    assert (twice.batch, twice.dense_flops) == (2, 2 * small.dense_flops)
    assert twice.vision_flops == 2 * small.vision_flops
    assert 1 < small.ideal_speedup < small.ideal_language_speedup
    assert small.vision_share == small.vision_flops / (small.vision_flops + small.dense_flops)
    assert "4x4" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["vision"][0]["ideal_speedup"] == small.ideal_speedup


@pytest.mark.parametrize(
    "given",
    [{"pixel_values": torch.ones(1)}, torch.ones(1, 2), {"input_ids": [1, 2]}],
    ids=["pixels", "tensor", "list"],
)
def test_figures_need_a_processors_output(given: Any) -> None:
    model = VISION_BY_NAME["gemma3"].build(torch.float32)
    with (
        sp.prune(model, METHODS[0]) as handle,
        pytest.raises(sp.SettingError, match=r"images\['640x480'\] must be what the processor returns"),
    ):
        handle.report(images={"640x480": given})


@pytest.mark.skipif(not RENAMED, reason="transformers before 5.24 differ in what a further turn may be given")
@every_model
@torch.no_grad()
def test_a_further_turn_about_the_same_image(kind: VisionModel) -> None:
    model = kind.build()
    inputs = kind.inputs(model, PROMPTS["one image"])
    length = inputs["input_ids"].shape[1]
    with InFloat64(), sp.prune(model, METHODS[0]):
        out = model.generate(**inputs, max_new_tokens=3, do_sample=False, return_dict_in_generate=True)
        second = torch.cat((out.sequences, tokens(1, 4)), dim=1)
        with exact_logits(model) as logits:
            third = model.generate(
                second, attention_mask=torch.ones_like(second), max_new_tokens=2, do_sample=False, **{CACHE: out[CACHE]}
            )
    positions = torch.arange(third.shape[1])[None]
    # The last generated token is not cached yet: it is context of the second prompt.
    closed = (positions < length - 1) | ((positions >= length + 2) & (positions < length + 6))
    with InFloat64():
        reference = gated_logits(model, (2, 3), closed, **ref.whole(inputs, third))[:, -3:-1]
    assert close(torch.stack(logits, dim=1), reference) < 1e-10
