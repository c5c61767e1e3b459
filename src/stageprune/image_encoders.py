"""The handle of a pruned image encoder (Segment Anything), which has one stage: the image."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Self

from torch import nn

from stageprune.channels.image_encoder import ImageChannelPruner
from stageprune.channels.sizes import Sizes
from stageprune.errors import AlreadyPrunedError, StageError, UnsupportedModelError
from stageprune.families.image_encoder import ImageEncoder
from stageprune.methods import Method, OnlineChannelPruning
from stageprune.overrides import override_owner


@dataclass(frozen=True)
class ImageReport:
    """What is pruned, and what that saves on one image.

    Attributes:
        num_hidden_layers: of the encoder.
        layers: sizes of the pruned FFNs, by layer index.
        kept: channels that each of them uses in its down projection.
        dense_flops: of the encoder for one image, a multiply-add as two.
        pruned_flops: likewise, pruned.
    """

    num_hidden_layers: int
    layers: dict[int, Sizes]
    kept: dict[int, int]
    dense_flops: int
    pruned_flops: int

    @property
    def ideal_speedup(self) -> float:
        """Of the encoder, if time went by floating-point operations alone."""
        return self.dense_flops / self.pruned_flops

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data."""
        return {**asdict(self), "ideal_speedup": self.ideal_speedup}

    def __str__(self) -> str:
        return (
            f"{len(self.layers)} of {self.num_hidden_layers} FFNs pruned: {self.dense_flops / 1e9:.4g} -> "
            f"{self.pruned_flops / 1e9:.4g} GFLOPs an image, ideal speed-up {self.ideal_speedup:.2f}x"
        )


class ImageEncoderHandle(AbstractContextManager["ImageEncoderHandle"]):
    """Pruning attached to an image encoder. Made by `prune()`; every call of the model is pruned until `remove()`.

    Attributes:
        model: what was given to `prune()`.
        methods: the settings in force.
    """

    def __init__(self, encoder: ImageEncoder, methods: tuple[Method, ...]) -> None:
        self.model: nn.Module = encoder.model
        self.methods = methods
        self._encoder = encoder
        self._attached = True
        self._pruner = ImageChannelPruner(encoder, _only_channels(encoder, methods), owner=self)

    @property
    def attached(self) -> bool:
        """Whether the model is still pruned by this handle."""
        return self._attached

    def remove(self) -> None:
        """Give the model back unchanged. Doing so twice is harmless."""
        self._pruner.detach()
        self._attached = False

    def stage(self, prefill: int) -> AbstractContextManager[None]:
        """Not for image encoders: an image has one stage.

        Raises:
            StageError: always.
        """
        raise StageError("an image encoder has one stage, the image: call the model as it is")

    def dense(self) -> AbstractContextManager[None]:
        """Inside the block the model is dense, without detaching."""
        return self._pruner.dense()

    def report(self) -> ImageReport:
        """What is pruned, and what it saves on one image of the size that the encoder takes."""
        pruned = self._pruner.layers
        with self.dense():
            flops = self._encoder.flops()
        saved = 2 * self._encoder.patches * sum(ffn.saved_weights for ffn in pruned.values())
        return ImageReport(
            num_hidden_layers=len(self._encoder.layers),
            layers={index: ffn.sizes for index, ffn in pruned.items()},
            kept={index: ffn.kept for index, ffn in pruned.items()},
            dense_flops=flops,
            pruned_flops=flops - saved,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()


def prune_image_encoder(encoder: ImageEncoder, methods: tuple[Method, ...]) -> ImageEncoderHandle:
    """See `pruning.prune`.

    Raises:
        AlreadyPrunedError: if the encoder carries a handle already.
        SettingError: if a setting does not fit an image encoder.
        UnsupportedModelError: if the method is not for one, or a layer cannot be described.
    """
    if image_handle_of(encoder) is not None:
        raise AlreadyPrunedError(f"this {type(encoder.model).__name__} is pruned already; remove() its handle first")
    if encoder.model.training:
        raise UnsupportedModelError(f"this {type(encoder.model).__name__} is in training mode: call model.eval() first")
    return ImageEncoderHandle(encoder, methods)


def image_handle_of(encoder: ImageEncoder) -> ImageEncoderHandle | None:
    """The handle in force on an encoder; None if it is not pruned."""
    owners = (override_owner(layer.mlp, "forward") for layer in encoder.layers)  # type: ignore[arg-type]
    return next((owner for owner in owners if isinstance(owner, ImageEncoderHandle)), None)


def _only_channels(encoder: ImageEncoder, methods: tuple[Method, ...]) -> OnlineChannelPruning:
    """The one method: `prune` takes each kind once."""
    for method in methods:
        if not isinstance(method, OnlineChannelPruning):
            raise UnsupportedModelError(
                f"{type(encoder.model).__name__} is an image encoder without keys and values to keep: only "
                f"OnlineChannelPruning can prune it, not {type(method).__name__}"
            )
    (channels,) = methods
    assert isinstance(channels, OnlineChannelPruning)
    return channels
