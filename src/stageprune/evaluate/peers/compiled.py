"""Transformers with `torch.compile`, in the same process and on the same weights."""

from __future__ import annotations

import os
import shutil
from typing import Any

import torch
import transformers

from stageprune.evaluate.clock import timed_generate
from stageprune.evaluate.peers.base import PeerError, Times
from stageprune.overrides import MethodOverride


class Compiled:
    """The dense model with its forward pass compiled, and a static cache, as transformers' documentation has it.

    Every new shape of prompts is compiled by itself, in the turn that does not count.

    Args:
        model: dense.
        backend: of `torch.compile`.

    Raises:
        PeerError: if there is no compiler that the backend needs.
    """

    name = "compile"

    def __init__(self, model: Any, backend: str = "inductor") -> None:
        if backend == "inductor" and model.device.type == "cpu":
            _require_compiler()
        self.precision = str(model.dtype).removeprefix("torch.")
        self.version = f"torch {torch.__version__}, transformers {transformers.__version__}"
        self._model = model
        self._attributes = set(vars(model))
        self._backend = backend
        self._shape: tuple[int, ...] = ()
        self._compiled: Any = None

    def answer(self, input_ids: torch.Tensor, new_tokens: int) -> Times:
        """See `Peer`."""
        shape = (*input_ids.shape, new_tokens)
        if shape != self._shape:
            torch.compiler.reset()  # or torch would stop compiling after a few shapes, without a word
            self._shape = shape
            self._compiled = torch.compile(self._model.forward, backend=self._backend, dynamic=False)

        def forward(original: Any, *args: Any, **kwargs: Any) -> Any:
            return self._compiled(*args, **kwargs)

        override = MethodOverride(self._model, "forward", forward)
        options = {"cache_implementation": "static", "disable_compile": True}
        try:
            answer = timed_generate(self._model, input_ids, new_tokens, stop_early=False, **options)
        except torch._dynamo.exc.TorchDynamoException as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise PeerError(f"torch.compile cannot compile this model: {reason:.200}") from error
        finally:
            override.remove()
        return Times(answer.first_token_s, answer.total_s)

    def close(self) -> None:
        """See `Peer`."""
        torch.compiler.reset()
        for name in set(vars(self._model)) - self._attributes:  # the static cache, which generate() keeps
            delattr(self._model, name)


def _require_compiler() -> None:
    name = os.environ.get("CXX") or next(filter(shutil.which, ("g++", "c++", "clang++")), "")
    if not shutil.which(name):
        raise PeerError("torch.compile needs a C++ compiler on the CPU; on Debian or Ubuntu: apt-get install g++")
