"""Small models that learned something, trained from scratch on the CPU in minutes: a mixture of experts, and one
that sees. Both have 12 layers, so that every ratio of the paper skips another number of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import list_tasks
import shapes
import torch
import transformers
from safetensors.torch import load_file, save_file

TRAIN_SEED, TEST_SEED = 0, 1


@dataclass(frozen=True)
class Recipe:
    """How a model is built, what it learns and for how long.

    Attributes:
        name: of the files.
        tasks: module with `example`, `TASKS` and the token ids.
        build: makes the untrained model.
        extras: what `forward` takes beside token ids and mask, for a batch of examples and its token ids.
        steps: of AdamW, with a warm-up and a linear decay.
        batch: examples in each.
        learning_rate: the highest.
    """

    name: str
    tasks: ModuleType
    build: Callable[[], Any]
    extras: Callable[[Sequence[Any], torch.Tensor], dict[str, torch.Tensor]]
    steps: int
    batch: int
    learning_rate: float

    def examples(self, count: int, seed: int, task: str | None = None) -> list[Any]:
        generator = random.Random(f"{seed} {task}")
        return [self.tasks.example(generator, task) for _ in range(count)]

    def inputs(self, examples: Sequence[Any]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """What `forward` takes, padded on the right, and the labels: the answers alone are learned."""
        width = max(len(one.prompt) + len(one.answer) for one in examples)
        ids = torch.full((len(examples), width), self.tasks.PAD)
        labels = torch.full_like(ids, -100)
        for row, one in enumerate(examples):
            start, end = len(one.prompt), len(one.prompt) + len(one.answer)
            ids[row, :end] = torch.tensor([*one.prompt, *one.answer])
            labels[row, start:end] = ids[row, start:end]
        inputs = {"input_ids": ids, "attention_mask": (ids != self.tasks.PAD).long(), **self.extras(examples, ids)}
        return inputs, labels


def trained(recipe: Recipe, folder: Path, on_step: Callable[[int, float], object]) -> Any:
    """The model from `folder`, or trained now and saved there.

    Args:
        recipe: of the model.
        folder: for the weights; made if it is missing.
        on_step: called with the number of steps done and the loss.
    """
    torch.manual_seed(TRAIN_SEED)
    model = recipe.build()
    file = folder / f"{recipe.name}.safetensors"
    if file.exists():
        model.load_state_dict(load_file(file), strict=False)  # tied weights are saved once
        model.tie_weights()
        return _for_inference(model)
    _train(model, recipe, on_step)
    folder.mkdir(parents=True, exist_ok=True)
    parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    save_file(parameters, file.with_suffix(".partial"))
    file.with_suffix(".partial").rename(file)
    return _for_inference(model)


def _for_inference(model: Any) -> Any:
    model.config.output_router_logits = False  # the loss that balances experts is for training
    return model.eval()


def _train(model: Any, recipe: Recipe, on_step: Callable[[int, float], object]) -> None:
    model.train()
    generator = random.Random(TRAIN_SEED)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 100) * max(0.02, 1 - step / recipe.steps)
    )
    for step in range(recipe.steps):
        inputs, labels = recipe.inputs([recipe.tasks.example(generator) for _ in range(recipe.batch)])
        loss = model(**inputs, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        on_step(step + 1, float(loss.detach()))


def _mixture_of_experts() -> Any:
    config = transformers.Qwen3MoeConfig(
        vocab_size=list_tasks.VOCAB_SIZE,
        hidden_size=64,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=48,
        norm_topk_prob=True,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
        max_position_embeddings=128,
        initializer_range=0.06,
        tie_word_embeddings=True,
        pad_token_id=list_tasks.PAD,
        bos_token_id=list_tasks.BEGIN,
        eos_token_id=list_tasks.END,
    )
    config._experts_implementation = "eager"
    return transformers.Qwen3MoeForCausalLM(config)


def _vision_language() -> Any:
    vision = dict(
        depth=4,
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        patch_size=shapes.PATCH,
        spatial_merge_size=shapes.MERGE,
        temporal_patch_size=2,
        out_hidden_size=64,
        num_position_embeddings=64,
        deepstack_visual_indexes=[1, 2],
        initializer_range=0.06,
    )
    text = dict(
        vocab_size=shapes.VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        rope_parameters=dict(rope_type="default", rope_theta=10000.0, mrope_section=[4, 2, 2], mrope_interleaved=True),
        initializer_range=0.06,
        pad_token_id=shapes.PAD,
        bos_token_id=shapes.BEGIN,
        eos_token_id=shapes.END,
    )
    special = dict(
        image_token_id=shapes.IMAGE,
        video_token_id=shapes.VIDEO,
        vision_start_token_id=shapes.VISION,
        vision_end_token_id=shapes.VISION_END,
    )
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, tie_word_embeddings=True, **special)
    return transformers.Qwen3VLForConditionalGeneration(config)


def _images(examples: Sequence[shapes.Example], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "mm_token_type_ids": (ids == shapes.IMAGE).int(),
        "pixel_values": shapes.patches(torch.stack([one.image for one in examples])),
        "image_grid_thw": shapes.grid_of(len(examples)),
    }


RECIPES = {
    "moe": Recipe("moe", list_tasks, _mixture_of_experts, lambda examples, ids: {}, 2000, 64, 3e-3),
    "vlm": Recipe("vlm", shapes, _vision_language, _images, 2000, 48, 2e-3),
}
