"""Which compiled kernels serve which device: C++ on the CPU, Triton on the GPU, with the same arguments and results."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TypeAlias

import torch

from stageprune.channels.kernels.native import load_native

Engine: TypeAlias = Callable[..., tuple[torch.Tensor, torch.Tensor]]
"""`ffn_decode`: see `triton_ffn.py` for what it is given and returns."""


def why_no_engine(device: torch.device) -> str | None:
    """What keeps the kernels from running on this device; None if nothing does."""
    if device.type == "cpu":
        return load_native()
    if device.type == "cuda":
        return _why_no_triton()
    return f"there are kernels for the CPU and for CUDA, the weights are on {device.type}"


def engine(device: torch.device) -> Engine:
    """The kernels of this device, for which `why_no_engine` is None."""
    if device.type == "cpu":
        native: Engine = torch.ops.stageprune.ffn_decode
        return native
    from stageprune.channels.kernels.triton_ffn import ffn_decode

    return ffn_decode


@cache
def _why_no_triton() -> str | None:
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"the kernels for CUDA need Triton, which cannot be imported: {error}"
    return None
