"""Synthetic images that a small vision-language model learns to describe in minutes: coloured shapes on a grid.

A prompt is `<begin> <vision> image tokens <end of vision> question =`; the answer counts what the image shows:

    describe = 2 red cross 1 blue square        (colours, then shapes, in a fixed order)
    red = 2                                     (how many of a colour; likewise of a shape)
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

PAD, BEGIN, END, EQUALS, VISION, VISION_END, IMAGE, VIDEO = range(8)
DESCRIBE = 8
COUNTS = range(9, 19)  # the numbers 0 to 9
COLOURS = {"red": 20, "green": 21, "blue": 22, "yellow": 23}
SHAPES = {"square": 24, "cross": 25, "ring": 26}
VOCAB_SIZE = 32
TASKS = ("describe", "colour", "shape")

PATCH, MERGE, GRID = 4, 2, 4  # pixels of a patch, patches of an image token each way, cells of an image each way
CELL = PATCH * MERGE
_RGB = {"red": (1.0, 0.0, 0.0), "green": (0.0, 1.0, 0.0), "blue": (0.0, 0.0, 1.0), "yellow": (1.0, 1.0, 0.0)}


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its answer, and the image, `[3, 32, 32]`."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    image: torch.Tensor


def example(generator: random.Random, task: str | None = None) -> Example:
    """A random example, of a random task if none is named."""
    task = task or generator.choice(TASKS)
    kinds = generator.sample([(colour, shape) for colour in COLOURS for shape in SHAPES], generator.randint(1, 3))
    objects = sorted(kinds * 1 + generator.choices(kinds, k=generator.randint(0, 4)), key=_order)
    if task == "describe":
        question = DESCRIBE
        answer = [
            token
            for colour, shape in sorted(kinds, key=_order)
            for token in (COUNTS[objects.count((colour, shape))], COLOURS[colour], SHAPES[shape])
        ]
    else:
        names = COLOURS if task == "colour" else SHAPES
        asked = generator.choice(list(names))
        question, answer = names[asked], [COUNTS[sum(asked in kind for kind in objects)]]
    prompt = (BEGIN, VISION, *[IMAGE] * GRID**2, VISION_END, question, EQUALS)
    return Example(task, prompt, (*answer, END), _image(objects, generator))


def patches(images: torch.Tensor) -> torch.Tensor:
    """Images `[n, 3, 32, 32]` as the Qwen-VL processors hand them on: rows of patches, `[n * 64, 3 * 2 * 4 * 4]`.

    The patches of one image token follow each other; a still image fills both frames of a patch.
    """
    parts = images.reshape(-1, 3, GRID, MERGE, PATCH, GRID, MERGE, PATCH)
    parts = parts.permute(0, 2, 5, 3, 6, 1, 4, 7)  # image, cell row and column, patch row and column, channel, pixels
    return parts.unsqueeze(6).expand(*parts.shape[:6], 2, PATCH, PATCH).reshape(-1, 3 * 2 * PATCH * PATCH)


def grid_of(images: int) -> torch.Tensor:
    """`image_grid_thw` of so many images: frames, rows and columns of patches."""
    return torch.tensor([[1, GRID * MERGE, GRID * MERGE]] * images)


def _order(kind: tuple[str, str]) -> tuple[int, int]:
    return COLOURS[kind[0]], SHAPES[kind[1]]


def _image(objects: list[tuple[str, str]], generator: random.Random) -> torch.Tensor:
    noise = torch.Generator().manual_seed(generator.getrandbits(32))
    image = 0.1 * torch.rand(3, GRID * CELL, GRID * CELL, generator=noise)
    for (colour, shape), cell in zip(objects, generator.sample(range(GRID**2), len(objects)), strict=True):
        row, column = divmod(cell, GRID)
        rows, columns = (slice(CELL * index, CELL * (index + 1)) for index in (row, column))
        image[:, rows, columns] += _mask(shape) * torch.tensor(_RGB[colour])[:, None, None] * generator.uniform(0.6, 1)
    return image


def _mask(shape: str) -> torch.Tensor:
    """`[8, 8]`, one where the shape is."""
    mask = torch.zeros(CELL, CELL)
    mask[1:7, 1:7] = 1
    if shape == "ring":
        mask[3:5, 3:5] = 0
    elif shape == "cross":
        mask[1:7, 1:7] = 0
        mask[3:5, 1:7] = mask[1:7, 3:5] = 1
    return mask
