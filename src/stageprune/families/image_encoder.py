"""Image encoders of Segment Anything, alone or inside the model that segments: layers with ungated FFNs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from stageprune.families.ffn import FFN, describe_ffn


@dataclass(frozen=True)
class ImageEncoder:
    """An encoder, taken apart.

    Attributes:
        model: what the user calls.
        encoder: the module that owns the layers, called with `pixel_values` `[batch, channels, height, width]`.
        layers: in order; each has an FFN that is called with `[batch, rows, columns, hidden_size]`.
    """

    model: nn.Module
    encoder: nn.Module
    layers: tuple[nn.Module, ...]

    @property
    def image_size(self) -> int:
        """Pixels each way of the images that it takes."""
        return int(self.encoder.config.image_size)  # type: ignore[union-attr, arg-type]

    @property
    def patches(self) -> int:
        """Of one image."""
        return int((self.image_size // int(self.encoder.config.patch_size)) ** 2)  # type: ignore[union-attr, arg-type]

    def ffn(self, index: int) -> FFN:
        """The FFN of a layer, checked against the module's own output.

        Raises:
            UnsupportedModelError: if the description does not fit.
        """
        return describe_ffn(index, self.layers[index])

    @torch.no_grad()
    def flops(self) -> int:
        """Floating-point operations for one image: matrix products and convolutions, a multiply-add as two."""
        from torch.utils.flop_counter import FlopCounterMode  # takes long to import

        weights = {name: torch.empty_like(value, device="meta") for name, value in _state(self.encoder)}
        channels = int(self.encoder.config.num_channels)  # type: ignore[union-attr, arg-type]
        dtype = next(self.encoder.parameters()).dtype
        pixels = torch.empty(1, channels, self.image_size, self.image_size, device="meta", dtype=dtype)
        with FlopCounterMode(display=False) as counter:
            torch.func.functional_call(self.encoder, weights, (pixels,))
        return int(counter.get_total_flops())


def find_image_encoder(model: Any) -> ImageEncoder | None:
    """The image encoder that this model is or has; None if it is no such model."""
    encoder = getattr(model, "vision_encoder", model)
    layers = getattr(encoder, "layers", None)
    if not isinstance(encoder, nn.Module) or not isinstance(layers, nn.ModuleList) or not hasattr(encoder, "neck"):
        return None
    if not all(hasattr(getattr(layer, "mlp", None), name) for layer in layers for name in ("lin1", "lin2")):
        return None
    return ImageEncoder(model, encoder, tuple(layers))


def _state(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
