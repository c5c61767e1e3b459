"""What a measurement ran on, as result files say it and interrupted runs compare it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from stageprune.cli.common import shown_name

if TYPE_CHECKING:
    from stageprune.models import LoadedModel


def model_of(loaded: LoadedModel, name: str) -> dict[str, Any]:
    """Which model, by name, shape, type and checksums.

    Args:
        loaded: the model.
        name: as the user gave it.
    """
    from stageprune.evaluate.fingerprint import fingerprint, identity

    return {
        "name": shown_name(name),
        **identity(loaded.model),
        "dtype": dtype_of(loaded),
        "fingerprint": fingerprint(loaded.model),
    }


def dtype_of(loaded: LoadedModel) -> str:
    """The type of the weights, such as `"bfloat16"`."""
    return str(loaded.model.dtype).removeprefix("torch.")


def environment_of(loaded: LoadedModel) -> dict[str, Any]:
    """What else a number can depend on: device, attention function and versions."""
    from stageprune.evaluate.system import system_info

    system = system_info()
    return {
        "device": str(loaded.model.device),
        "attention": loaded.model.config._attn_implementation,
        "versions": {name: system[name] for name in ("stageprune", "torch", "transformers")},
    }
