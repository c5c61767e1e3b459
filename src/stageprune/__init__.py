"""stageprune: prune each stage of inference in the way that stage tolerates."""

from typing import TYPE_CHECKING, Any

from stageprune.errors import (
    AlreadyPrunedError,
    DataError,
    ModelLoadError,
    NumericsError,
    PromptError,
    ResultFileError,
    SettingError,
    StageError,
    StagePruneError,
    UnsupportedModelError,
)
from stageprune.image_encoders import ImageEncoderHandle, ImageReport
from stageprune.methods import OnlineChannelPruning, PrefillOnlyPruning
from stageprune.prefill.importance import Importance
from stageprune.pruning import Handle, handle_of, prune
from stageprune.report import Report
from stageprune.settings_file import load_settings, save_settings

if TYPE_CHECKING:
    from stageprune.loading import load
    from stageprune.models import LoadedModel

__version__ = "0.1.0"

__all__ = [
    "AlreadyPrunedError",
    "DataError",
    "Handle",
    "ImageEncoderHandle",
    "ImageReport",
    "Importance",
    "LoadedModel",
    "ModelLoadError",
    "NumericsError",
    "OnlineChannelPruning",
    "PrefillOnlyPruning",
    "PromptError",
    "Report",
    "ResultFileError",
    "SettingError",
    "StageError",
    "StagePruneError",
    "UnsupportedModelError",
    "handle_of",
    "load",
    "load_settings",
    "prune",
    "save_settings",
]


def __getattr__(name: str) -> Any:
    """Load the loaders when they are asked for: they bring in transformers, which takes seconds."""
    if name == "LoadedModel":
        from stageprune.models import LoadedModel

        return LoadedModel
    if name == "load":
        from stageprune.loading import load

        return load
    raise AttributeError(f"module 'stageprune' has no attribute {name!r}")
