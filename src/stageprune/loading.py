"""`load`: whatever the name stands for, a model or a setting."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from stageprune.errors import SettingError
from stageprune.models import load as load_model
from stageprune.prefill.projections import RECORD, fitted_setting


def load(name: str | os.PathLike[str], **options: Any) -> Any:
    """Load a model, or the setting for which `stageprune calibrate` fitted K/V projections.

    Args:
        name: what `stageprune.models.load` takes, or a folder that `stageprune calibrate` wrote.
        options: of the model, see there; none for a setting.

    Returns:
        `LoadedModel`, a model and its tokenizer; or `PrefillOnlyPruning` with the layers and the folder of projections,
        to be given to `prune()`, which refuses a model that they were not fitted for.

    Raises:
        ModelLoadError: if it is a model that cannot be loaded.
        ResultFileError: if it is a folder of projections that is damaged, incomplete or of another version.
        SettingError: if options are given for a setting.
    """
    if not is_projections(name):
        return load_model(name, **options)
    if options:
        raise SettingError(f"{os.fspath(name)!r} holds fitted K/V projections; {next(iter(options))} is about a model")
    return fitted_setting(name)


def is_projections(name: Any) -> bool:
    """Whether this is a folder that `stageprune calibrate` wrote, and not also a model."""
    try:
        folder = Path(os.path.expanduser(name))
        return (folder / RECORD).is_file() and not (folder / "config.json").exists()
    except (TypeError, ValueError, OSError, RuntimeError):
        return False
