"""Which model this is: a checksum of its configuration and of a part of each weight."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch

_PER_TENSOR = 64
_UNRELATED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


def fingerprint(model: Any) -> str:
    """A checksum that tells models apart, fine-tuned ones too, without reading all of their weights.

    It covers the configuration and, of every parameter, name, shape, dtype and 64 elements spread over it. Weights that
    are offloaded count with name and shape.
    """
    checksum = hashlib.sha256()
    config = {key: value for key, value in model.config.to_dict().items() if key not in _UNRELATED}
    checksum.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, parameter in model.named_parameters():
        checksum.update(f"{name} {tuple(parameter.shape)} {parameter.dtype}".encode())
        if parameter.device.type != "meta":
            flat = parameter.detach().reshape(-1)
            step = max(1, flat.numel() // _PER_TENSOR)
            checksum.update(flat[::step].to("cpu", torch.float64).numpy().tobytes())
    return checksum.hexdigest()
