"""Where stageprune keeps what it builds: converted models, compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path

from stageprune.errors import StagePruneError


def cache_directory() -> Path:
    """Where stageprune keeps what it builds: `$STAGEPRUNE_CACHE`, else the platform's cache directory.

    Raises:
        StagePruneError: if no variable names a directory and the user has no home.
    """
    if own := os.environ.get("STAGEPRUNE_CACHE"):
        return Path(own).absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore relative ones
        return Path(xdg) / "stageprune"
    try:
        return Path.home() / ".cache" / "stageprune"
    except RuntimeError as error:
        raise StagePruneError(f"no cache directory: {error} Set STAGEPRUNE_CACHE to a folder.") from error
