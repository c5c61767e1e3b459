"""What a vision-language model computes before its language model runs: the encoder and the projector.

Pruning leaves that part as it is, so it bounds what can be saved of the time to the first token. Its cost depends on
how a processor cuts an image into tiles and patches; so it is counted on a processor's own outputs, not guessed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from stageprune.errors import SettingError
from stageprune.families.decoder import Decoder
from stageprune.overrides import MethodOverride


class _Reached(Exception):
    """The language model is about to run."""


@torch.no_grad()
def vision_flops(decoder: Decoder, inputs: Mapping[str, Any]) -> int:
    """Run all that comes before the language model, and count its floating-point operations.

    Matrix products and convolutions, a multiply-add as two, as torch counts them; attention kernels that torch does not
    know (the flash-attn package) are missing.

    Args:
        decoder: of the model, which must be dense at the moment.
        inputs: what `generate()` would get: a processor's outputs.

    Raises:
        SettingError: if the model does not run its language model on these inputs.
    """
    from torch.utils.flop_counter import FlopCounterMode  # takes long to import

    def stop(*_: Any, **__: Any) -> Any:
        raise _Reached

    override = MethodOverride(decoder.body, "forward", stop)
    try:
        with _positions_kept(decoder.model), FlopCounterMode(display=False) as counter:
            try:
                decoder.model(**inputs)
            except _Reached:
                return int(counter.get_total_flops())
    finally:
        override.remove()
    raise SettingError(f"{type(decoder.model).__name__} does not run its language model on these inputs")


@contextmanager
def _positions_kept(model: nn.Module) -> Iterator[None]:
    """Qwen-VL models remember the positions of the last prompt, on which a later turn would build."""
    kept = [(module, module.rope_deltas) for module in model.modules() if "rope_deltas" in vars(module)]
    try:
        yield
    finally:
        for module, deltas in kept:
            module.rope_deltas = deltas
