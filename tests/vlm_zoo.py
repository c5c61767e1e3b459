"""Tiny random-weight vision-language models, and prompts for them laid out as their processors do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import transformers

from zoo import VOCAB, unsettled

IMAGE, VIDEO, START, END = range(VOCAB, VOCAB + 4)
"""Token ids: placeholders of image and video features, and what stands around them."""

TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB + 4,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
)
_SIGLIP = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, patch_size=4)
_QWEN = dict(depth=2, num_heads=2, patch_size=4, spatial_merge_size=2, temporal_patch_size=2)
_MROPE = dict(rope_type="default", rope_theta=10000.0, mrope_section=[1, 1, 2])

Part: TypeAlias = int | tuple[str, int, int] | tuple[str, int, int, int]
"""A prompt's part: so many text tokens, `("image", height, width)` or `("video", frames, height, width)` in patches."""


@dataclass(frozen=True)
class VisionModel:
    """How to build one tiny model, and its inputs.

    Attributes:
        name: of the case.
        model_class: of transformers.
        config: makes the configuration, of the composite model.
        layout: turns prompts into the processor's outputs.
        videos: whether the model takes videos as such (others see images).
        mrope: whether it has positions in three dimensions.
    """

    name: str
    model_class: str
    config: Callable[..., Any]
    layout: Callable[[Any, Sequence[Sequence[Part]]], dict[str, torch.Tensor]]
    videos: bool = False
    mrope: bool = False

    def build(self, dtype: torch.dtype = torch.float64, attn: str = "eager", seed: int = 0, **text: Any) -> Any:
        torch.manual_seed(seed)
        config = self.config(**text)
        config._attn_implementation = attn
        model = getattr(transformers, self.model_class)(config).to(dtype).eval()
        model.set_attn_implementation(attn)
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0
        unsettled(model)
        with torch.no_grad():
            model.lm_head.weight[VOCAB:] = 0  # placeholders are never the likeliest
        return model

    def inputs(self, model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
        """What a processor would return for a batch of prompts, padded on the left."""
        return {
            name: value.to(model.dtype) if value.is_floating_point() else value
            for name, value in self.layout(model, prompts).items()
        }


PROMPTS: dict[str, list[list[Part]]] = {
    "text": [[9], [5]],
    "one image": [[3, ("image", 4, 4), 4]],
    "two images": [[2, ("image", 4, 4), 2, ("image", 4, 4), 3]],
    "ends with an image": [[4, ("image", 4, 4)]],
    "mixed": [[3, ("image", 4, 4), 4], [6], [1, ("image", 4, 4), 1, ("image", 4, 4), 2]],
}
VIDEOS: dict[str, list[list[Part]]] = {
    "video": [[3, ("video", 2, 4, 4), 3]],
    "image and video": [[2, ("video", 2, 4, 4), 2, ("image", 4, 4), 2], [4], [3, ("image", 4, 4), 1]],
}
SIZES: list[list[Part]] = [[3, ("image", 4, 8), 4], [2, ("image", 6, 4), 1, ("image", 4, 4), 2]]
"""Images of different sizes, for models that take them as they are."""


def _qwen3_vl(**text: Any) -> Any:
    vision = _QWEN | dict(
        depth=3, hidden_size=16, intermediate_size=24, out_hidden_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)
    return transformers.Qwen3VLConfig(
        text_config=TEXT | dict(head_dim=12, rope_parameters=rope) | text, vision_config=vision, **_special()
    )


def _qwen3_vl_moe(**text: Any) -> Any:
    """Experts in all layers but the third."""
    vision = _QWEN | dict(
        depth=3, hidden_size=16, intermediate_size=24, out_hidden_size=32, num_position_embeddings=16,
        deepstack_visual_indexes=[0, 2],
    )  # fmt: skip
    rope = dict(rope_type="default", rope_theta=10000.0, mrope_section=[2, 2, 2], mrope_interleaved=True)
    experts = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=20, mlp_only_layers=[2])
    config = transformers.Qwen3VLMoeConfig(
        text_config=TEXT | dict(head_dim=12, rope_parameters=rope, **experts) | text,
        vision_config=vision,
        **_special(),
    )
    config._experts_implementation = config.text_config._experts_implementation = "eager"  # others: no float64
    return config


def _qwen2_vl(**text: Any) -> Any:
    vision = _QWEN | dict(embed_dim=16, hidden_size=32, mlp_ratio=2)
    return transformers.Qwen2VLConfig(
        text_config=TEXT | dict(rope_parameters=_MROPE) | text, vision_config=vision, **_special()
    )


def _qwen2_5_vl(**text: Any) -> Any:
    vision = _QWEN | dict(
        hidden_size=16, intermediate_size=24, out_hidden_size=32, window_size=16, fullatt_block_indexes=[1]
    )
    return transformers.Qwen2_5_VLConfig(
        text_config=TEXT | dict(rope_parameters=_MROPE) | text, vision_config=vision, **_special()
    )


def _special() -> dict[str, int]:
    return dict(image_token_id=IMAGE, video_token_id=VIDEO, vision_start_token_id=START, vision_end_token_id=END)


def _gemma3(**text: Any) -> Any:
    own = dict(
        head_dim=8,
        sliding_window=7,
        query_pre_attn_scalar=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        tie_word_embeddings=False,
    )
    return transformers.Gemma3Config(
        text_config=TEXT | own | text,
        vision_config=_SIGLIP | dict(image_size=24, model_type="siglip_vision_model"),
        mm_tokens_per_image=9,
        boi_token_index=START,
        eoi_token_index=END,
        image_token_index=IMAGE,
        tie_word_embeddings=False,
    )


def _llava_onevision(**text: Any) -> Any:
    return transformers.LlavaOnevisionConfig(
        text_config=TEXT | dict(model_type="qwen2", tie_word_embeddings=False) | text,
        vision_config=_SIGLIP | dict(image_size=8, model_type="siglip_vision_model", vision_use_head=False),
        image_token_index=IMAGE,
        video_token_index=VIDEO,
        image_grid_pinpoints=[[8, 8], [8, 16], [16, 8], [16, 16]],
        vision_aspect_ratio="anyres_max_9",
    )


def _smolvlm(**text: Any) -> Any:
    return transformers.SmolVLMConfig(
        text_config=TEXT | dict(model_type="llama", tie_word_embeddings=False) | text,
        vision_config=_SIGLIP | dict(image_size=16),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _idefics3(**text: Any) -> Any:
    return transformers.Idefics3Config(
        text_config=TEXT | dict(model_type="llama", tie_word_embeddings=False) | text,
        vision_config=_SIGLIP | dict(image_size=16),
        image_token_id=IMAGE,
        scale_factor=2,
        tie_word_embeddings=False,
    )


def _internvl(**text: Any) -> Any:
    return transformers.InternVLConfig(
        text_config=TEXT | dict(model_type="qwen2", tie_word_embeddings=False) | text,
        vision_config=_SIGLIP | dict(image_size=[16, 16], patch_size=[4, 4]),
        image_token_id=IMAGE,
        image_seq_length=4,
        tie_word_embeddings=False,
    )


def _padded(rows: Sequence[list[int]]) -> dict[str, torch.Tensor]:
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    lengths = torch.tensor([len(row) for row in rows])
    mask = (torch.arange(longest)[None] >= longest - lengths[:, None]).long()
    return dict(input_ids=ids, attention_mask=mask)


class _Writer:
    """Writes prompts as token ids; `media` is asked for the tokens of everything that is no text."""

    def __init__(self, prompts: Sequence[Sequence[Part]], media: Callable[[Any], list[int]]) -> None:
        self.random = torch.Generator().manual_seed(7)
        self.rows: list[list[int]] = []
        for prompt in prompts:
            row: list[int] = []
            for part in prompt:
                row += self.text(part) if isinstance(part, int) else media(part)
            self.rows.append(row)

    def text(self, count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=self.random).tolist()


def _pixels(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _qwen_layout(model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """Pixels as rows of patches; Qwen3-VL writes the frames of a video apart, with their time in between."""
    grids: dict[str, list[list[int]]] = {"image": [], "video": []}
    timed = model.config.model_type.startswith("qwen3_vl")

    def media(part: Any) -> list[int]:
        kind, *grid = part if part[0] == "video" else (part[0], 1, *part[1:])
        grids[kind].append(grid)
        frames, height, width = grid
        token = IMAGE if kind == "image" else VIDEO
        if kind == "video" and timed:
            return [x for t in range(frames) for x in (5 + t, START, *[token] * (height * width // 4), END)]
        return [START, *[token] * (frames * height * width // 4), END]

    inputs = _padded(_Writer(prompts, media).rows)
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    for kind, name in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        if grids[kind]:
            grid = torch.tensor(grids[kind])
            inputs[f"{kind}_grid_thw"] = grid
            inputs[name] = _pixels(int(grid.prod(-1).sum()), 3 * 2 * 4 * 4, seed=len(name))
    return inputs


def _gemma3_layout(model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """Every image has the same size and number of tokens; their token type is 1."""
    writer = _Writer(prompts, lambda part: [3, START, *[IMAGE] * 9, END, 3])
    inputs = _padded(writer.rows)
    inputs["token_type_ids"] = (inputs["input_ids"] == IMAGE).long()
    images = _count(prompts)
    if images:
        inputs["pixel_values"] = _pixels(images, 3, 24, 24, seed=1)
    return inputs


def _llava_onevision_layout(model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """One image in a prompt is seen whole and in tiles, several are seen whole; a line ends with an extra token."""
    several = [sum(not isinstance(part, int) and part[0] == "image" for part in prompt) for prompt in prompts]
    images, videos = sum(several), _count(prompts) - sum(several)
    inputs: dict[str, torch.Tensor] = {}
    lengths: list[int] = []
    if images:
        inputs["pixel_values"] = _pixels(images, 5, 3, 8, 8, seed=1)
        inputs["image_sizes"] = torch.tensor([[16, 16]] * images)
        inputs["batch_num_images"] = torch.tensor([count for count in several if count])
        lengths = [4 + 4 * 5 if count == 1 else 5 for count in several for _ in range(count)]
    if videos:
        inputs["pixel_values_videos"] = _pixels(videos, 2, 3, 8, 8, seed=2)
    left = iter(lengths)
    writer = _Writer(prompts, lambda part: [IMAGE] * next(left) if part[0] == "image" else [VIDEO] * 3)
    return _padded(writer.rows) | inputs


def _tiles_layout(model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    """SmolVLM and Idefics3: `[batch, most images in a prompt, ...]`, filled up with black images."""
    inputs = _padded(_Writer(prompts, lambda part: [START, *[IMAGE] * 4, END]).rows)
    counts = [_count([prompt]) for prompt in prompts]
    if any(counts):
        pixels = _pixels(len(prompts), max(counts), 3, 16, 16, seed=1)
        for row, count in enumerate(counts):
            pixels[row, count:] = 0
        inputs["pixel_values"] = pixels
        inputs["pixel_attention_mask"] = torch.ones(len(prompts), max(counts), 16, 16, dtype=torch.long)
    return inputs


def _internvl_layout(model: Any, prompts: Sequence[Sequence[Part]]) -> dict[str, torch.Tensor]:
    inputs = _padded(_Writer(prompts, lambda part: [START, *[IMAGE] * 4, END]).rows)
    images = _count(prompts)
    if images:
        inputs["pixel_values"] = _pixels(images, 3, 16, 16, seed=1)
    return inputs


def _count(prompts: Sequence[Sequence[Part]]) -> int:
    return sum(not isinstance(part, int) for prompt in prompts for part in prompt)


VISION_MODELS = [
    VisionModel("qwen3-vl", "Qwen3VLForConditionalGeneration", _qwen3_vl, _qwen_layout, videos=True, mrope=True),
    VisionModel(
        "qwen3-vl-moe", "Qwen3VLMoeForConditionalGeneration", _qwen3_vl_moe, _qwen_layout, videos=True, mrope=True
    ),
    VisionModel("qwen2-vl", "Qwen2VLForConditionalGeneration", _qwen2_vl, _qwen_layout, videos=True, mrope=True),
    VisionModel("qwen2.5-vl", "Qwen2_5_VLForConditionalGeneration", _qwen2_5_vl, _qwen_layout, True, True),
    VisionModel("gemma3", "Gemma3ForConditionalGeneration", _gemma3, _gemma3_layout),
    VisionModel(
        "llava-onevision", "LlavaOnevisionForConditionalGeneration", _llava_onevision, _llava_onevision_layout, True
    ),
    VisionModel("smolvlm", "SmolVLMForConditionalGeneration", _smolvlm, _tiles_layout),
    VisionModel("idefics3", "Idefics3ForConditionalGeneration", _idefics3, _tiles_layout),
    VisionModel("internvl", "InternVLForConditionalGeneration", _internvl, _internvl_layout),
]
VISION_BY_NAME = {model.name: model for model in VISION_MODELS}


def prompts_of(model: VisionModel) -> dict[str, list[list[Part]]]:
    """The prompts that this model takes, by name."""
    prompts = dict(PROMPTS)
    if model.videos:
        prompts |= VIDEOS
    if model.mrope:
        prompts["sizes"] = SIZES
    return prompts
