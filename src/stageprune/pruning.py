"""`prune()` and the handle it returns: attach methods to a model, and take them away again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType
from typing import Any, Protocol, Self, overload

from torch import nn

from stageprune.baselines.base import Attachment, Baseline, Calibration, check_calibration
from stageprune.channels.pruner import ChannelPruner
from stageprune.errors import AlreadyPrunedError, SettingError, UnsupportedModelError
from stageprune.families.decoder import find_decoder
from stageprune.families.image_encoder import find_image_encoder
from stageprune.image_encoders import ImageEncoderHandle, image_handle_of, prune_image_encoder
from stageprune.methods import Method, OnlineChannelPruning, PrefillOnlyPruning
from stageprune.overrides import overridden, override_owner
from stageprune.prefill.skip import PrefillPruner
from stageprune.report import Report, make_report
from stageprune.stages import StageTracker


class SegmentsImages(Protocol):
    """A model that has an image encoder instead of a decoder, such as `SamModel`."""

    vision_encoder: Any


@overload
def prune(model: nn.Module, *methods: Method, calibration: Calibration | None = None) -> Handle: ...


@overload
def prune(model: SegmentsImages, *methods: Method) -> ImageEncoderHandle: ...


def prune(model: Any, *methods: Method, calibration: Calibration | None = None) -> Handle | ImageEncoderHandle:
    """Attach pruning methods to a model, in place; its weights are not touched.

    `model.generate()` is pruned from now on, until the handle is removed or its `with` block ends; then the model is
    the original again, bit for bit. A plain `model(...)` stays dense, unless it runs inside `handle.stage(prefill=n)`.

    Segment Anything (`SamModel`, `SamHQModel`, or their encoders alone) has no generation: with
    `OnlineChannelPruning`, every call is pruned, each image (or batch, see `scope`) by its own activations.

    Args:
        model: a decoder-only causal language model of transformers, or an image encoder, in evaluation mode.
        methods: the settings, such as `PrefillOnlyPruning(ratio=1/3)`; at most one of each kind. Or one of
            `stageprune.baselines`, which prunes every forward pass, prompt and answer alike.
        calibration: token ids of some texts, for baselines that need them.

    Returns:
        The handle: a context manager with `remove()`, `report()` and `stage()`.

    Raises:
        AlreadyPrunedError: if the model carries a handle already.
        SettingError: if no method is given, one is given twice, or a setting does not fit the model.
        UnsupportedModelError: if the model cannot be pruned, or fitted projections are of another one; the message
            names the layer and the reason.
        ResultFileError: if a folder of fitted projections is missing or damaged.
    """
    _check_methods(methods)
    model = _unwrapped(model)
    images = find_image_encoder(model)
    if images is not None:
        return prune_image_encoder(images, methods)
    decoder = find_decoder(model)
    if overridden((model, *decoder.layers), "forward"):
        raise AlreadyPrunedError(
            f"this {type(model).__name__} is pruned already; call remove() on its handle (handle_of(model)) first, "
            "and pass all methods to one prune() call to combine them"
        )
    if model.training:
        raise UnsupportedModelError(
            f"this {type(model).__name__} is in training mode; pruning is for inference: call model.eval() first"
        )
    return Handle(model, methods, calibration)


def handle_of(model: nn.Module) -> Handle | ImageEncoderHandle | None:
    """The handle that `prune()` returned for this model; None if it is not pruned."""
    images = find_image_encoder(_unwrapped(model))
    if images is not None:
        return image_handle_of(images)
    owner = override_owner(_unwrapped(model), "generate")
    return owner if isinstance(owner, Handle) else None


class Handle(AbstractContextManager["Handle"]):
    """Pruning attached to one model. Made by `prune()`.

    Attributes:
        model: the pruned model.
        methods: the settings in force.
    """

    def __init__(self, model: nn.Module, methods: tuple[Method, ...], calibration: Calibration | None = None) -> None:
        self.model = model
        self.methods = methods
        self._decoder = find_decoder(model)
        texts = check_calibration(methods[0], calibration) if isinstance(methods[0], Baseline) else ()
        self._tracker = StageTracker(model, owner=self)
        self._prefill: PrefillPruner | None = None
        self._channels: ChannelPruner | None = None
        self._baseline: Attachment | None = None
        self._attached = True
        try:
            for method in methods:
                if isinstance(method, Baseline):
                    self._baseline = method.attach(self._decoder, self._tracker, texts, self)
                elif isinstance(method, PrefillOnlyPruning):
                    self._prefill = PrefillPruner(self._decoder, method, self._tracker)
                elif isinstance(method, OnlineChannelPruning):
                    self._channels = ChannelPruner(self._decoder, method, self._tracker)
        except BaseException:
            self.remove()
            raise

    @property
    def attached(self) -> bool:
        """Whether the model is still pruned by this handle."""
        return self._attached

    def remove(self) -> None:
        """Give the model back unchanged. Doing so twice is harmless."""
        for pruner in (self._baseline, self._channels, self._prefill):
            if pruner is not None:
                pruner.detach()
        self._tracker.detach()
        self._attached = False

    def stage(self, prefill: int) -> AbstractContextManager[None]:
        """Say the stages of the `model(...)` calls inside the block, for callers that drive `forward` themselves.

        The first `prefill` new positions of each call encode the context and may be pruned; the rest are decode. To
        score a continuation after a context of N tokens: `prefill = N - 1`, and `logits_to_keep` for the rest. For a
        chunk of context that is not the last: all its positions; the logits are then empty.

        Raises:
            StageError: if `prefill` is no count, or (in the call) logits of pruned positions are asked for.
        """
        return self._tracker.stage(prefill)

    def dense(self) -> AbstractContextManager[None]:
        """Inside the block the model is dense, without detaching: `generate()` and `forward` alike."""
        return self._tracker.dense() if self._baseline is None else self._all_dense(self._baseline)

    @contextmanager
    def _all_dense(self, baseline: Attachment) -> Iterator[None]:
        with self._tracker.dense(), baseline.dense():
            yield

    def observe(self) -> AbstractContextManager[None]:
        """Inside the block, watch which channels generated tokens choose; `report()` shows it afterwards.

        Slow, and without any effect on what the model answers (arXiv 2602.06822, Figure 2).

        Raises:
            SettingError: if no channels are pruned.
        """
        if self._channels is None:
            raise SettingError("observe() watches pruned channels; give prune() an OnlineChannelPruning(...)")
        return self._channels.observe()

    def report(self, prompt_length: int = 2048, images: Mapping[str, Mapping[str, Any]] | None = None) -> Report:
        """What is skipped, and what it saves on a prompt of `prompt_length` tokens.

        Args:
            prompt_length: of a prompt of text.
            images: for vision-language models: prompts with images or videos by name, such as `"640x480"`, each what
                the processor returns for it. Runs the vision encoder on them, to count what pruning leaves untouched.

        Raises:
            SettingError: if an entry of `images` is no processor's output.
        """
        with self.dense():
            return make_report(
                self._decoder, self.methods, self._prefill, self._channels, self._baseline, prompt_length, images or {}
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def _check_methods(methods: tuple[Method, ...]) -> None:
    if not methods:
        raise SettingError("no method given; for instance prune(model, PrefillOnlyPruning(ratio=1/3))")
    for method in methods:
        if isinstance(method, Baseline) and len(methods) > 1:
            raise SettingError(f"{type(method).__name__} is a baseline: it cannot be combined with other methods")
        if not isinstance(method, (PrefillOnlyPruning, OnlineChannelPruning, Baseline)):
            raise SettingError(f"expected a method such as PrefillOnlyPruning(...), got {type(method).__name__}")
    kinds = [method.kind for method in methods]
    if len(set(kinds)) != len(kinds):
        raise SettingError(f"each method can be given once, got {', '.join(kinds)}")


def _unwrapped(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT wrapper; adapters stay in force, as they sit in the layers."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
