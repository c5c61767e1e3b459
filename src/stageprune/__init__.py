"""stageprune: prune each stage of inference in the way that stage tolerates."""

from stageprune.errors import (
    AlreadyPrunedError,
    ModelLoadError,
    PromptError,
    SettingError,
    StageError,
    StagePruneError,
    UnsupportedModelError,
)
from stageprune.methods import PrefillOnlyPruning
from stageprune.pruning import Handle, handle_of, prune
from stageprune.report import Report

__version__ = "0.1.0"

__all__ = [
    "AlreadyPrunedError",
    "Handle",
    "ModelLoadError",
    "PrefillOnlyPruning",
    "PromptError",
    "Report",
    "SettingError",
    "StageError",
    "StagePruneError",
    "UnsupportedModelError",
    "handle_of",
    "prune",
]
