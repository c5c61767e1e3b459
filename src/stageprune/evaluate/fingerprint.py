"""Which model this is: checksums of its configuration and of a part of each weight."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from stageprune.errors import ResultFileError
from stageprune.families.decoder import find_decoder

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
        checksum.update(_elements(parameter, torch.float64))
    return checksum.hexdigest()


def identity(model: Any) -> dict[str, Any]:
    """Which model an artefact is for, as JSON-ready data: the same in every dtype and version of transformers.

    Raises:
        UnsupportedModelError: if this is no decoder-only causal language model.
    """
    return {
        "architecture": type(model).__name__,
        "num_hidden_layers": len(find_decoder(model).layers),
        "weights": _weights(model),
    }


def check_identity(found: Mapping[str, Any], model: Any, path: Path) -> None:
    """Refuse an artefact of another model.

    Args:
        found: what the artefact says: at least the keys of `identity`.
        model: the model that it shall be used with.
        path: of the artefact.

    Raises:
        ResultFileError: names the file and what differs.
    """
    ours = identity(model)
    differing = [name for name in ours if found.get(name) != ours[name]]
    if differing:
        shown = "; ".join(
            "the weights differ" if name == "weights" else f"{name}: {found.get(name)!r} there, {ours[name]!r} here"
            for name in differing
        )
        raise ResultFileError(f"{str(path)!r} is of another model ({shown})")


def _weights(model: Any) -> str:
    """A checksum of 64 elements of each parameter; rounded, so that a model is the same in bfloat16 and in float32."""
    checksum = hashlib.sha256()
    for name, parameter in model.named_parameters():
        checksum.update(f"{name} {tuple(parameter.shape)}".encode())
        checksum.update(_elements(parameter, torch.bfloat16))
    return checksum.hexdigest()


def _elements(parameter: torch.Tensor, dtype: torch.dtype) -> bytes:
    """64 of its elements or a few more, as they are in this type; nothing if it is offloaded."""
    if parameter.device.type == "meta":
        return b""
    flat = parameter.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _PER_TENSOR)].to("cpu", dtype)
    # numpy has no bfloat16.
    return (some.float() if dtype == torch.bfloat16 else some).numpy().tobytes()
