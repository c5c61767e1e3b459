"""Whether the packages of the extra `[serve]` are there."""

from __future__ import annotations

import importlib.util

from stageprune.errors import ServingError

_PACKAGES = {"fastapi": "fastapi", "uvicorn": "uvicorn", "prometheus_client": "prometheus-client"}


def require_extra() -> None:
    """Find out before a model is loaded.

    Raises:
        ServingError: says what is missing, and how to install it.
    """
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise ServingError(f"the server needs {', '.join(missing)}; run: pip install 'stageprune[serve]'")
