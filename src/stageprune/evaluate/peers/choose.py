"""Peers by name."""

from __future__ import annotations

from typing import Any

import torch

from stageprune.evaluate.peers.base import Peer, PeerError
from stageprune.evaluate.peers.compiled import Compiled
from stageprune.evaluate.peers.process import ProcessPeer
from stageprune.models.loading import gguf_file


def open_peer(name: str, model: Any, source: str, context: int) -> Peer:
    """Start a peer.

    Args:
        name: one of `stageprune.evaluate.peers.NAMES`.
        model: the dense model.
        source: what it was loaded from, as `load` takes it.
        context: tokens of a prompt and its answer, at most.

    Raises:
        PeerError: if it is not installed, or cannot run this model.
    """
    if name == "compile":
        return Compiled(model)
    device = model.device.type
    options = {
        "context": context,
        "threads": torch.get_num_threads(),
        "gpu": device != "cpu",
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    gguf = gguf_file(source)
    if name == "llama.cpp":
        if gguf is None:
            raise PeerError(f"llama.cpp reads GGUF files, and {source!r} is none")
        return ProcessPeer(name, ("llama_cpp", "llama-cpp-python"), str(gguf), options)
    if gguf is not None and source != "demo":
        raise PeerError("vllm is compared on folders and hub ids; a GGUF file would have another precision in it")
    return ProcessPeer(name, ("vllm", "vllm"), model.name_or_path, options)
