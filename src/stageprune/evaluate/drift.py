"""How far prefill-only pruning moves what a layer sees (arXiv 2602.03295, appendix C, Figure 2).

The full model and the one whose prefill gates are 0 at the skipped layers read the same prompt and response. Compared,
by cosine similarity for each position, are the hidden states that enter a layer, its keys and its values at prompt
positions (all heads as one vector), and its attention branch at decode positions. The first skipped layer still sees
the full model's prompt, so its similarities are 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from stageprune.errors import UnsupportedModelError
from stageprune.families.caches import RecordingCache
from stageprune.families.calls import LayerSignature
from stageprune.families.decoder import Decoder
from stageprune.overrides import MethodOverride
from stageprune.prefill.fisher import Sequences
from stageprune.prefill.gates import VirtualGates, open_gates, prefill_gates
from stageprune.prefill.importance import DRIFTS, Drift


@torch.no_grad()
def measure_drift(gates: VirtualGates, sequences: Sequences, skipped: tuple[int, ...]) -> list[Drift]:
    """The drift of each sample, for the layers from the first skipped one on.

    Args:
        gates: entered.
        sequences: prompts of two tokens or more, and responses.
        skipped: layers, ascending; may be empty, then all drifts are.

    Raises:
        UnsupportedModelError: if a layer hands no keys and values to its cache.
    """
    count = len(gates.decoder.layers)
    layers = tuple(range(skipped[0], count)) if skipped else ()
    full = _states(gates, sequences, open_gates(1, count), layers)
    pruned = _states(gates, sequences, prefill_gates(skipped, count), layers)
    in_prompt, in_decode = _positions(sequences)
    similarities: dict[str, list[torch.Tensor]] = {what: [] for what in DRIFTS}
    for layer in layers:
        for what in DRIFTS:
            rows = in_decode if what == "attention" else in_prompt
            similarities[what].append(_similarity(full[layer][what], pruned[layer][what], rows))
    batch = len(sequences.input_ids)
    return [
        Drift(**{what: tuple(float(values[row]) for values in similarities[what]) for what in DRIFTS})
        for row in range(batch)
    ]


def _positions(sequences: Sequences) -> tuple[torch.Tensor, torch.Tensor]:
    """The real positions of each stage, `[batch, positions of the forward pass]`: prefill and decode."""
    real = sequences.mask[:, :-1].bool()
    columns = torch.arange(real.shape[1], device=real.device)
    prompt = real & (columns < sequences.width - 1)
    decode = torch.zeros_like(prompt)
    # Position t predicts token t + 1: decode positions are those that predict a token of the response.
    decode[:, sequences.width - 1 :] = sequences.responded
    return prompt, decode


def _similarity(a: torch.Tensor, b: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Mean cosine similarity over some rows of each sample, `[batch]`, from states `[batch, length, size]`."""
    cosine = F.cosine_similarity(a.double(), b.double(), dim=-1)
    rows = rows.to(cosine.device)
    return torch.where(rows, cosine, 0).sum(-1) / rows.sum(-1)


def _states(
    gates: VirtualGates, sequences: Sequences, prefill: torch.Tensor, layers: tuple[int, ...]
) -> dict[int, dict[str, torch.Tensor]]:
    """The states of some layers by name, each `[batch, length, size]`, of a pass with these prefill gates."""
    states: dict[int, dict[str, torch.Tensor]] = {layer: {} for layer in layers}
    if not layers:
        return states
    decoder, device = gates.decoder, sequences.input_ids.device
    decode = open_gates(1, len(decoder.layers)).to(device)
    active = []
    try:
        for layer in layers:
            recorder = _LayerRecorder(decoder, layer, states[layer])
            active.append(MethodOverride(decoder.layers[layer], "forward", recorder))
            active.append(MethodOverride(gates.branches[layer].attention, "forward", recorder.attention))
        with gates.at(prefill.to(device), decode, context=sequences.width - 1):
            decoder.body(**sequences.inputs(decoder.body), use_cache=False)
    finally:
        for override in reversed(active):
            override.remove()
    return states


class _LayerRecorder:
    """Stands in for one layer's forward, and keeps what `measure_drift` compares."""

    def __init__(self, decoder: Decoder, index: int, states: dict[str, torch.Tensor]) -> None:
        self._index = index
        self._signature = LayerSignature(decoder.layers[index], decoder.config)
        self._states = states

    def __call__(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        call, cache = self._signature.bind(args, kwargs), RecordingCache()
        hidden_states = call.hidden_states
        output = forward(**call.decode_rows(hidden_states, cache, 0, hidden_states.shape[1]))
        if cache.keys is None or cache.values is None:
            raise UnsupportedModelError(f"layer {self._index} hands no keys and values to its cache")
        self._states["hidden_states"] = hidden_states
        self._states["keys"] = cache.keys.transpose(1, 2).flatten(2)
        self._states["values"] = cache.values.transpose(1, 2).flatten(2)
        return output

    def attention(self, forward: Any, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the forward of the layer's attention branch."""
        output = forward(*args, **kwargs)
        self._states["attention"] = output[0] if isinstance(output, tuple) else output
        return output
