"""What each method can do for a model, from its configuration alone: no weight is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMaskGeneration

from stageprune.errors import StagePruneError
from stageprune.families.costs import prompt_flops
from stageprune.families.decoder import find_decoder
from stageprune.families.experts import find_experts
from stageprune.families.image_encoder import find_image_encoder
from stageprune.families.image_size import image_cost
from stageprune.families.verify import check_structure
from stageprune.methods import OnlineChannelPruning, PrefillOnlyPruning
from stageprune.prefill.layers import skipped_layers
from stageprune.pruning import prune

PROMPT_LENGTHS = (128, 512, 2048, 8192)
QUESTION_TOKENS = 32
"""Of text beside an image."""

IMAGE_SIZES = ((640, 480), (1280, 720), (1920, 1080), (2560, 1440))
"""The paper's (arXiv 2602.03295, Table 2)."""


@dataclass(frozen=True)
class ImageSupport:
    """A prompt of one image and a short question.

    Attributes:
        size: `"640x480"`.
        tokens: of the prompt.
        vision_share: share of the operations up to the first token that cannot be pruned.
        ideal_speedup: of the time to the first token, with the vision encoder.
        ideal_language_speedup: without it.
    """

    size: str
    tokens: int
    vision_share: float
    ideal_speedup: float
    ideal_language_speedup: float


@dataclass(frozen=True)
class ChannelSupport:
    """What online channel pruning can do.

    Attributes:
        supported: whether the FFNs can be pruned, as far as the structure tells.
        reason: why not.
        mlp_ratio: share of the FFN's channels that a token leaves out (of its experts' channels).
        ideal_decode_speedups: of a generated token by weights and cached values read, for some prompt lengths.
        ideal_ffn_speedup: of the FFNs alone, likewise.
        ideal_flops_speedup: of a generated token's matrix products without attention to the cache.
    """

    supported: bool
    reason: str | None = None
    mlp_ratio: float | None = None
    ideal_decode_speedups: tuple[tuple[int, float], ...] = ()
    ideal_ffn_speedup: float | None = None
    ideal_flops_speedup: float | None = None


@dataclass(frozen=True)
class Support:
    """What both methods can do for a model; the figures without a prefix are about prefill-only pruning.

    Attributes:
        architecture: the class of the model; None if it could not be built.
        supported: whether prefill-only pruning can be applied, as far as the structure tells.
        verified: whether the loaded layers were checked, too, as `prune()` does.
        reason: why it cannot.
        kind: `"text"`, `"mixture of experts"`, `"vision-language"` or `"image encoder"`, or two of them.
        parameters: how many the model has.
        num_hidden_layers: of the decoder.
        skipped_layers: what the prompt would skip, zero-based.
        max_position_embeddings: the longest context, in tokens.
        ideal_speedups: of the time to the first token by floating-point operations, for some prompt lengths.
        images: for vision-language models whose images can be counted from the configuration.
        channels: online channel pruning.
    """

    architecture: str | None
    supported: bool
    verified: bool = False
    reason: str | None = None
    kind: str | None = None
    parameters: int | None = None
    num_hidden_layers: int | None = None
    skipped_layers: tuple[int, ...] = ()
    max_position_embeddings: int | None = None
    ideal_speedups: tuple[tuple[int, float], ...] = ()
    images: tuple[ImageSupport, ...] = ()
    channels: ChannelSupport = ChannelSupport(False)

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        data = {**asdict(self), "ideal_speedups": _by_length(self.ideal_speedups)}
        data["channels"]["ideal_decode_speedups"] = _by_length(self.channels.ideal_decode_speedups)
        return data


def support_of_config(
    config: Any,
    method: PrefillOnlyPruning,
    channels: OnlineChannelPruning | None = None,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    images: Sequence[tuple[int, int]] = IMAGE_SIZES,
) -> Support:
    """Build a model without weights (on the meta device) from its configuration, and look at its structure.

    Args:
        config: of transformers.
        method: of prefill-only pruning.
        channels: of channel pruning; None for its defaults.
        lengths: of prompts, in tokens; longer ones than the model's context are left out.
        images: width and height in pixels.
    """
    if getattr(config, "is_encoder_decoder", False):
        reason = f"{config.model_type} is an encoder-decoder model; stageprune prunes decoder-only models"
        return Support(None, False, reason=reason, channels=ChannelSupport(False, reason))
    try:
        with torch.device("meta"):
            model = _model_class(config).from_config(config)
    except Exception as error:  # noqa: BLE001 - a configuration can be wrong in as many ways as there are architectures
        reason = f"no model can be built from it: {' '.join(str(error).split())[:300]}"
        return Support(None, False, reason=reason, channels=ChannelSupport(False, reason))
    return support_of_model(model, method, channels, lengths, images)


def support_of_model(
    model: torch.nn.Module,
    method: PrefillOnlyPruning,
    channels: OnlineChannelPruning | None = None,
    lengths: Sequence[int] = PROMPT_LENGTHS,
    images: Sequence[tuple[int, int]] = IMAGE_SIZES,
) -> Support:
    """Look at a model's structure; its weights are not used. Arguments as for `support_of_config`."""
    name, model = type(model).__name__, model.eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    channels = channels or OnlineChannelPruning()
    if find_image_encoder(model) is not None:
        reason = "an image encoder has no keys and values to keep, and generates nothing"
        support = _image_encoder(model, channels)
        return Support(name, False, reason=reason, kind="image encoder", parameters=parameters, channels=support)
    try:
        decoder = find_decoder(model)
    except StagePruneError as error:
        return Support(name, False, reason=str(error), channels=ChannelSupport(False, str(error)))
    longest = getattr(decoder.config, "max_position_embeddings", None)
    lengths = [length for length in lengths if longest is None or length <= longest]
    base: dict[str, Any] = dict(
        architecture=name,
        kind=_kind(decoder),
        parameters=parameters,
        num_hidden_layers=len(decoder.layers),
        max_position_embeddings=longest,
        channels=_channels(model, channels, lengths),
    )
    try:
        skipped = skipped_layers(method, len(decoder.layers))
        free = {*skipped, len(decoder.layers) - 1} if skipped else set()
        check_structure(decoder, sorted(free))
    except StagePruneError as error:
        return Support(**base, supported=False, reason=str(error))
    return Support(
        **base,
        supported=True,
        skipped_layers=skipped,
        ideal_speedups=tuple(
            (length, prompt_flops(decoder, length) / prompt_flops(decoder, length, free)) for length in lengths
        ),
        images=tuple(found for size in images if (found := _image(decoder, free, *size)) is not None),
    )


def _model_class(config: Any) -> Any:
    """The class of transformers that builds the whole model, with its head where it has one."""
    kinds = (AutoModelForImageTextToText, AutoModelForCausalLM, AutoModelForMaskGeneration)
    return next((kind for kind in kinds if type(config) in kind._model_mapping), AutoModel)


def _kind(decoder: Any) -> str:
    kinds = []
    if any(find_experts(layer) is not None for layer in decoder.layers):
        kinds.append("mixture of experts")
    if decoder.config is not decoder.model.config and hasattr(decoder.model.config, "vision_config"):
        kinds.append("vision-language")
    return ", ".join(kinds) or "text"


def _channels(model: torch.nn.Module, method: OnlineChannelPruning, lengths: Sequence[int]) -> ChannelSupport:
    try:
        with prune(model, method) as handle:
            reports = {length: handle.report(length) for length in lengths or (1,)}
    except StagePruneError as error:
        return ChannelSupport(False, str(error))
    report = next(iter(reports.values()))
    if not report.channels:
        return ChannelSupport(True, mlp_ratio=0.0)
    sizes = report.channels[0].sizes
    saved = sum(part.dense_weights - part.weights for part in report.channels)
    dense = _weights_of_a_step(model)
    return ChannelSupport(
        True,
        mlp_ratio=1 - sizes.active / sizes.total,
        ideal_decode_speedups=tuple((length, reports[length].ideal_decode_speedup) for length in lengths),
        ideal_ffn_speedup=report.ideal_ffn_speedup,
        ideal_flops_speedup=dense / (dense - saved),
    )


def _weights_of_a_step(model: torch.nn.Module) -> int:
    """That one token is multiplied with; as many multiply-adds."""
    return prompt_flops(find_decoder(model), 1) // 2


def _image_encoder(model: torch.nn.Module, method: OnlineChannelPruning) -> ChannelSupport:
    handle: Any
    try:
        with prune(model, method) as handle:
            report = handle.report()
    except StagePruneError as error:
        return ChannelSupport(False, str(error))
    sizes = next(iter(report.layers.values()), None)
    ratio = 0.0 if sizes is None else 1 - sizes.active / sizes.total
    return ChannelSupport(True, mlp_ratio=ratio, ideal_flops_speedup=report.ideal_speedup)


def _image(decoder: Any, free: set[int], width: int, height: int) -> ImageSupport | None:
    image = image_cost(decoder.model, width, height)
    if image is None:
        return None
    length = image.tokens + 2 + QUESTION_TOKENS  # an image stands between two tokens
    dense, pruned = prompt_flops(decoder, length), prompt_flops(decoder, length, free)
    whole = image.flops + dense
    return ImageSupport(
        f"{width}x{height}", length, image.flops / whole, whole / (image.flops + pruned), dense / pruned
    )


def _by_length(values: Sequence[tuple[int, float]]) -> dict[str, float]:
    return {str(length): ideal for length, ideal in values}
