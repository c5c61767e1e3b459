"""Prefill-only pruning the slow, obviously-right way (arXiv 2602.03295, section 1.4 of the digest).

One dense forward over the whole sequence, without a cache, in which every skipped layer's gate is 0 at prefill
positions and 1 at decode positions: the layer runs on all positions, computes its keys and values from what arrives
(they are not gated, Eq. 5), and at prefill positions its output is replaced by its input.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch


def layers_of(model: Any) -> Any:
    body = model.get_decoder() if hasattr(model, "get_decoder") else model.base_model
    for name in ("layers", "h"):
        if hasattr(body, name):
            return getattr(body, name)
    raise AssertionError("no layers")


@torch.no_grad()
def gated_logits(
    model: Any, skipped: Collection[int], prefill: torch.Tensor | int, hide_context: bool = False, **inputs: Any
) -> torch.Tensor:
    """Logits `[batch, length, vocabulary]` of a forward with position-dependent gates.

    Args:
        model: untouched.
        skipped: layers whose gate is 0 where `prefill` is true.
        prefill: how many leading positions are prefill, or a boolean mask `[batch, length]` of them.
        hide_context: the ablation without K/V projection: in skipped layers nobody sees the prefill positions'
            keys (needs the eager backend, whose mask is explicit).
        inputs: `input_ids` and so on.
    """
    tokens = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
    batch, length = tokens.shape[:2]
    if isinstance(prefill, int):
        closed = (torch.arange(length) < prefill)[None].expand(batch, length)
    else:
        closed = prefill

    def gate(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        arrived = args[0] if args else kwargs["hidden_states"]
        hidden = output[0] if isinstance(output, tuple) else output
        hidden = torch.where(closed[..., None], arrived, hidden)
        return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

    def hide(module: Any, args: Any, kwargs: Any) -> Any:
        mask = kwargs["attention_mask"].masked_fill(closed[:, None, None], torch.finfo(model.dtype).min)
        return args, kwargs | {"attention_mask": mask}

    hooks = [layers_of(model)[index].register_forward_hook(gate, with_kwargs=True) for index in skipped]
    if hide_context:
        hooks += [layers_of(model)[index].register_forward_pre_hook(hide, with_kwargs=True) for index in skipped]
    try:
        return model(**inputs, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
