"""Whether a model can be pruned, from its configuration alone: no weight is read."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from stageprune.errors import StagePruneError
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import find_decoder
from stageprune.families.verify import check_structure
from stageprune.methods import PrefillOnlyPruning
from stageprune.prefill.layers import skipped_layers

PROMPT_LENGTHS = (128, 512, 2048, 8192)


@dataclass(frozen=True)
class Support:
    """What prefill-only pruning can do for a model.

    Attributes:
        architecture: the class of the model; None if it could not be built.
        supported: whether it can be pruned, as far as its structure tells.
        verified: whether the loaded layers were checked, too, as `prune()` does.
        reason: why it cannot be pruned.
        parameters: how many the model has.
        num_hidden_layers: of the model.
        skipped_layers: what the prompt would skip, zero-based.
        max_position_embeddings: the longest context, in tokens.
        ideal_speedups: of the time to the first token by floating-point operations, for some prompt lengths.
    """

    architecture: str | None
    supported: bool
    verified: bool = False
    reason: str | None = None
    parameters: int | None = None
    num_hidden_layers: int | None = None
    skipped_layers: tuple[int, ...] = ()
    max_position_embeddings: int | None = None
    ideal_speedups: tuple[tuple[int, float], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "ideal_speedups": {str(length): ideal for length, ideal in self.ideal_speedups}}


def support_of_config(config: Any, method: PrefillOnlyPruning) -> Support:
    """Build a model without weights (on the meta device) from its configuration, and look at its structure."""
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # noqa: BLE001 - a configuration can be wrong in as many ways as there are architectures
        text = " ".join(str(error).split())
        return Support(None, False, reason=f"no decoder language model can be built from it: {text[:300]}")
    return support_of_model(model, method)


def support_of_model(model: torch.nn.Module, method: PrefillOnlyPruning) -> Support:
    """Look at a model's structure; its weights are not used."""
    name = type(model).__name__
    try:
        decoder = find_decoder(model)
        skipped = skipped_layers(method, len(decoder.layers))
        free = {*skipped, len(decoder.layers) - 1} if skipped else set()
        check_structure(decoder, sorted(free))
    except StagePruneError as error:
        return Support(name, False, reason=str(error))
    longest = getattr(decoder.config, "max_position_embeddings", None)
    lengths = [length for length in PROMPT_LENGTHS if longest is None or length <= longest]
    return Support(
        architecture=name,
        supported=True,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        num_hidden_layers=len(decoder.layers),
        skipped_layers=skipped,
        max_position_embeddings=longest,
        ideal_speedups=tuple(
            (length, prompt_flops(decoder, length) / prompt_flops(decoder, length, free)) for length in lengths
        ),
    )
