"""What an image costs a Qwen-VL model, from the model's shapes alone: no weights, no processor.

Other families cut images into tiles by rules of their processors; for those, `families/vision.py` counts on what a
processor returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from stageprune.families.costs import linear_weights


@dataclass(frozen=True)
class ImageCost:
    """One image.

    Attributes:
        tokens: in the prompt.
        flops: of the encoder and the projector, a multiply-add as two.
    """

    tokens: int
    flops: int


def image_cost(model: nn.Module, width: int, height: int) -> ImageCost | None:
    """The cost of an image that the processor neither shrinks nor enlarges; None for other families.

    Args:
        model: also on the meta device.
        width: in pixels; each side is rounded to whole tokens, as the processor does.
        height: in pixels.
    """
    visual: Any = getattr(getattr(model, "model", model), "visual", None)
    if visual is None or not all(hasattr(visual, name) for name in ("patch_embed", "blocks", "merger")):
        return None
    vision = visual.config
    patch, merge = int(vision.patch_size), int(vision.spatial_merge_size)
    rows, columns = (max(round(side / (patch * merge)), 1) for side in (height, width))
    tokens, merged = rows * columns, merge * merge
    weights = visual.patch_embed.proj.weight.numel() + linear_weights(visual.blocks)
    projectors = [visual.merger, *(getattr(visual, "deepstack_merger_list", None) or ())]
    projected = sum(map(linear_weights, projectors))
    pairs = sum(_windows(rows, columns, merge, _window(vision, index)) for index in range(len(visual.blocks)))
    size = int(visual.blocks[0].attn.qkv.in_features)
    return ImageCost(tokens, 2 * (tokens * merged * weights + tokens * projected + 2 * size * pairs))


def _window(vision: Any, index: int) -> int | None:
    """Tokens each way that a layer attends within; None for the whole image (only Qwen2.5-VL has windows)."""
    full = getattr(vision, "fullatt_block_indexes", None)
    if full is None or index in full:
        return None
    return int(vision.window_size) // int(vision.spatial_merge_size) // int(vision.patch_size)


def _windows(rows: int, columns: int, merge: int, window: int | None) -> int:
    """Pairs of patches that attend to each other."""
    if window is None:
        return (rows * columns * merge * merge) ** 2

    def cuts(length: int) -> list[int]:
        return [min(window, length - start) for start in range(0, length, window)]

    return sum((high * wide * merge * merge) ** 2 for high in cuts(rows) for wide in cuts(columns))
