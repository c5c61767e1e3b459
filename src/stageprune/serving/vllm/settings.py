"""What the engine is told: `"stageprune"` among its `--hf-overrides`, or a `stageprune.json` by the checkpoint."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, TypeAlias, cast, get_args

from stageprune.errors import SettingError
from stageprune.methods import PrefillOnlyPruning
from stageprune.methods.base import choice
from stageprune.prefill.layers import skipped_layers
from stageprune.prefill.projections import KVProjections, fitted_setting
from stageprune.settings_file import load_settings

PrefixCache: TypeAlias = Literal["exact", "shared"]
Role: TypeAlias = Literal["both", "prefill"]

_OWN_KEYS = ("prefix_cache", "role", "settings")


@dataclass(frozen=True)
class EngineSettings:
    """Prefill-only pruning of one model in an engine.

    Attributes:
        layers: the layers that prompts skip, ascending.
        projections: the folder of fitted K/V projections, or None for the layers' own.
        prefix_cache: `"exact"`: cached blocks are shared between requests only where each of their tokens was processed
            in the same stage, so answers never depend on what is cached; `"shared"`: an earlier answer, which the full
            model wrote, is also used as the prompt of the next turn.
        role: `"prefill"`: an instance that only encodes prompts for another one, and holds nothing of the skipped
            layers but their K/V projections.
        fingerprint: of everything that the cached keys and values depend on; part of their key.
    """

    layers: tuple[int, ...]
    projections: str | None = None
    prefix_cache: PrefixCache = "exact"
    role: Role = "both"
    fingerprint: str = ""

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data, which travels to the engine's processes inside the model's configuration."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> EngineSettings:
        """The inverse of `to_dict`."""
        return cls(**{**data, "layers": tuple(data["layers"])})


def engine_settings(requested: Any, num_hidden_layers: int) -> EngineSettings | None:
    """Resolve what was asked for.

    Args:
        requested: the value of the `"stageprune"` override: settings of `PrefillOnlyPruning`, and `prefix_cache` and
            `role` of `EngineSettings`; or `{"settings": FILE}`, a file that `stageprune plan` or `save_settings` wrote;
            or False: do not prune, whatever lies by the checkpoint.
        num_hidden_layers: of the model.

    Returns:
        None if nothing is skipped: the engine is then its own self.

    Raises:
        SettingError: for wrong settings, and those that an engine cannot follow.
        ResultFileError: if a file that they name cannot be read.
    """
    if requested is False:
        return None
    if not isinstance(requested, Mapping):
        raise SettingError(
            'the "stageprune" override must be an object such as {"ratio": 0.33}, or false, got '
            f"{type(requested).__name__}: {requested!r}"
        )
    own = {key: requested[key] for key in _OWN_KEYS if key in requested}
    method = _method(
        {key: value for key, value in requested.items() if key not in _OWN_KEYS}, own.pop("settings", None)
    )
    prefix_cache = choice("prefix_cache", own.get("prefix_cache", "exact"), get_args(PrefixCache))
    role = choice("role", own.get("role", "both"), get_args(Role))
    layers = skipped_layers(method, num_hidden_layers)
    if not layers:
        if role == "prefill":
            raise SettingError("role 'prefill' is for an instance without the deep layers, but no layer is skipped")
        return None
    if role == "prefill" and layers != tuple(range(num_hidden_layers - len(layers), num_hidden_layers)):
        raise SettingError(f"role 'prefill' needs the last layers to be the skipped ones, not {list(layers)}")
    return EngineSettings(
        layers,
        method.projections,
        cast(PrefixCache, prefix_cache),
        cast(Role, role),
        _fingerprint(layers, method.projections, prefix_cache),
    )


def _method(values: dict[str, Any], file: Any) -> PrefillOnlyPruning:
    if file is not None:
        if values:
            raise SettingError(f'"settings" names a file with all settings; {sorted(values)[0]!r} cannot apply')
        if not isinstance(file, str) or not file:
            raise SettingError(f'"settings" must name a file, got {type(file).__name__}: {file!r}')
        methods = load_settings(os.path.expanduser(file))
        if [type(method) for method in methods] != [PrefillOnlyPruning]:
            kinds = ", ".join(method.kind for method in methods) or "no method"
            raise SettingError(f"engines follow prefill-only pruning alone, and {file!r} has {kinds}")
        return _checked(cast(PrefillOnlyPruning, methods[0]))
    known = [*(field.name for field in fields(PrefillOnlyPruning)), *_OWN_KEYS]
    unknown = sorted(key for key in values if key not in known and key != "method")
    if unknown:
        raise SettingError(f'unknown setting {unknown[0]!r} in the "stageprune" override; known: {", ".join(known)}')
    for name in ("importance", "projections"):
        if values.get(name) == "":
            raise SettingError(f"{name} must name a file or folder, got str: ''")
    if isinstance(values.get("importance"), str):
        values["importance"] = os.path.expanduser(values["importance"])
    if values.get("projections") is not None and "layers" not in values and isinstance(values["projections"], str):
        if "ratio" in values:
            raise SettingError("projections are for the layers that they were fitted for; ratio cannot apply")
        return _checked(fitted_setting(values["projections"]))
    return _checked(PrefillOnlyPruning.from_dict(values))


def _checked(method: PrefillOnlyPruning) -> PrefillOnlyPruning:
    for name, meaning in (("kv_projection", "keys and values of all tokens"), ("boundary", "last prompt tokens")):
        if not getattr(method, name):
            raise SettingError(f"{name}=false is an ablation for transformers; engines need {meaning}")
    return method


def _fingerprint(layers: tuple[int, ...], projections: str | None, prefix_cache: str) -> str:
    """The role is left out on purpose: both instances of a pair write the same keys and values."""
    fitted = None if projections is None else KVProjections.load(projections).record["sha256"]
    return hashlib.sha256(json.dumps([list(layers), fitted, prefix_cache]).encode()).hexdigest()[:16]
