"""Run the calibration texts through the dense model, and watch what enters some of its modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from stageprune.baselines.base import Calibration
from stageprune.families.decoder import Decoder

Watcher = Callable[[torch.Tensor], None]
"""Called with the first input of the module, `[tokens, features]`, for each text."""


def watch_inputs(decoder: Decoder, calibration: Calibration, watchers: Mapping[nn.Module, Watcher]) -> None:
    """Tell each watcher what enters its module, one text after the other."""

    def told(watcher: Watcher) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
            inputs = args[0] if args else kwargs["hidden_states"]
            watcher(inputs.detach().flatten(0, -2))

        return hook

    run_hooked(
        decoder,
        calibration,
        [module.register_forward_pre_hook(told(watcher), with_kwargs=True) for module, watcher in watchers.items()],
    )


@torch.no_grad()
def run_hooked(decoder: Decoder, calibration: Calibration, hooks: Sequence[RemovableHandle]) -> None:
    """Run each text through the model without a cache, then remove the hooks."""
    device = next(decoder.body.parameters()).device
    try:
        for text in calibration:
            decoder.body(input_ids=torch.tensor([list(text)], device=device), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
