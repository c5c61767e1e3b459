"""The settings of prefill-only pruning."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, get_args

from stageprune.errors import SettingError
from stageprune.methods.base import Method, flag, layer_indices, share
from stageprune.prefill.importance import Importance

LayerRule: TypeAlias = Literal["last", "first", "interleaved", "importance"]


@dataclass(frozen=True)
class PrefillOnlyPruning(Method):
    """Skip deep layers while the prompt is encoded; only their keys and values are projected (arXiv 2602.03295).

    The last prompt token and every generated token go through the full model.

    Args:
        ratio: share of the decoder layers to skip, 0 <= ratio < 1; the count is `floor(ratio * num_hidden_layers)`,
            which gives the paper's 10 of 32, 12 of 36 and 16 of 48. Not used when `layers` lists indices.
        layers: which layers: `"last"` (the paper's rule), `"first"` or `"interleaved"` (its ablations, Table 3),
            `"importance"`: those that `importance` says prefill needs least, or explicit zero-based indices.
        kv_projection: `False` writes no keys and values for the skipped layers ("w/o independent KV projections",
            Table 3): an ablation, for single prompts on a dynamic cache.
        boundary: `False` sends the last prompt token through the pruned model as well ("w/o boundary handling",
            Table 3): an ablation.
        importance: for `layers="importance"`: the prefill importance of each layer, an `Importance`, or the file that
            `stageprune analyze` wrote. The setting keeps the numbers alone, as a tuple.
        contiguous: for `layers="importance"`: the run of neighbouring layers with the least total importance (equal
            ones: the deepest), or `False`: the least important layers wherever they are (equal ones: the deeper).
        projections: the folder of fitted K/V projections that `stageprune calibrate` wrote for these layers; None for
            the layers' own (the paper). `stageprune.load(FOLDER)` gives the setting with the layers that it is for.

    Raises:
        SettingError: on a wrong type or value.
        ResultFileError: if the file of importance scores cannot be read.
    """

    kind: ClassVar[str] = "prefill-only-pruning"

    ratio: float = 1 / 3
    layers: LayerRule | Sequence[int] = "last"
    kv_projection: bool = True
    boundary: bool = True
    importance: Importance | Sequence[float] | str | Path | None = None
    contiguous: bool = True
    projections: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", share("ratio", self.ratio))
        object.__setattr__(self, "layers", _layer_choice(self.layers))
        for name in ("kv_projection", "boundary", "contiguous"):
            flag(name, getattr(self, name))
        if self.importance is not None:
            object.__setattr__(self, "importance", _prefill_scores(self.importance))
        if self.layers == "importance" and self.importance is None:
            raise SettingError(
                "layers='importance' needs importance=, such as the file that `stageprune analyze` wrote"
            )
        if self.layers != "importance" and (self.importance is not None or not self.contiguous):
            name = "contiguous" if self.importance is None else "importance"
            raise SettingError(f"{name} is for layers='importance', but layers is {self.layers!r}")
        if self.projections is not None:
            object.__setattr__(self, "projections", _folder(self.projections))
            if not self.kv_projection:
                raise SettingError("projections cannot apply with kv_projection=False, which projects nothing")


def _folder(value: Any) -> str:
    name = os.fspath(value) if isinstance(value, (str, os.PathLike)) else value
    if not isinstance(name, str) or not name:
        raise SettingError(f"projections must name a folder, got {type(value).__name__}: {value!r}")
    return name


def _layer_choice(value: Any) -> LayerRule | tuple[int, ...]:
    """A rule's name unchanged, or explicit indices as a sorted tuple."""
    if isinstance(value, str):
        if value in get_args(LayerRule):
            return value  # type: ignore[return-value]
        raise SettingError(f"layers must be one of {get_args(LayerRule)} or a list of layer indices, got {value!r}")
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise SettingError(
            f"layers must be one of {get_args(LayerRule)} or a list of layer indices, got {type(value).__name__}"
        )
    return layer_indices("layers", value)


def _prefill_scores(value: Any) -> tuple[float, ...]:
    """The prefill importance of each layer, from wherever it is given."""
    if isinstance(value, (str, Path)):
        value = Importance.load(value)
    if isinstance(value, Importance):
        return tuple(estimate.mean for estimate in value.scores("prefill"))
    if isinstance(value, bytes) or not isinstance(value, Sequence):
        raise SettingError(
            f"importance must be an Importance, its file, or a list of one number per layer, got {type(value).__name__}"
        )
    for score in value:
        if isinstance(score, bool) or not isinstance(score, (int, float)) or not _finite(score):
            raise SettingError(f"importance must list finite numbers, got {type(score).__name__}: {score!r}")
    if not value:
        raise SettingError("importance must list one number per layer, got none")
    return tuple(map(float, value))


def _finite(score: float) -> bool:
    try:
        return math.isfinite(score)
    except OverflowError:  # an integer that is larger than any float
        return False
