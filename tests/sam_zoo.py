"""Tiny random-weight models of Segment Anything, and what they are given."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from zoo import unsettled

VISION = dict(
    hidden_size=16, output_channels=8, num_hidden_layers=3, num_attention_heads=2, image_size=32, patch_size=4,
    window_size=3, global_attn_indexes=[1], mlp_dim=40, num_pos_feats=4, initializer_range=0.2,
)  # fmt: skip
PROMPT = dict(hidden_size=8, image_size=32, patch_size=4, mask_input_channels=4, num_point_embeddings=4)
DECODER = dict(hidden_size=8, mlp_dim=16, num_hidden_layers=2, num_attention_heads=2, iou_head_hidden_dim=8)


def build(kind: str = "Sam", attn: str = "sdpa") -> Any:
    torch.manual_seed(0)
    own = dict(vit_dim=16) if kind == "SamHQ" else {}
    config = getattr(transformers, f"{kind}Config")(
        vision_config=VISION, prompt_encoder_config=PROMPT, mask_decoder_config=DECODER | own
    )
    config._attn_implementation = config.vision_config._attn_implementation = attn
    model = unsettled(getattr(transformers, f"{kind}Model")(config).double().eval())
    with torch.no_grad():
        for layer in model.vision_encoder.layers:
            layer.mlp.lin1.weight *= 4  # images differ in what they need
    return model


def images(batch: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(batch, 3, 32, 32, generator=generator, dtype=torch.float64)
    pixels += torch.randn(batch, 3, 1, 1, generator=generator, dtype=torch.float64) * 3  # images of different kinds
    points = 32 * torch.rand(batch, 1, 1, 2, generator=generator, dtype=torch.float64)
    return dict(pixel_values=pixels, input_points=points)
