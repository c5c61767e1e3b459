"""What all settings have in common: frozen dataclasses, validated on construction, that round-trip through JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from stageprune.errors import SettingError


@dataclass(frozen=True)
class Method:
    """Base of all settings. Subclasses are plain data: what they do lives in `prefill/` and its siblings."""

    kind: ClassVar[str] = ""

    def to_dict(self) -> dict[str, Any]:
        """The settings as JSON-ready data, with the method's name under `"method"`."""
        return {"method": self.kind, **asdict(self)}

    def to_json(self) -> str:
        """The settings as a JSON object."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`.

        Raises:
            SettingError: for another method's data, an unknown key or a wrong value.
        """
        if not isinstance(data, Mapping):
            raise SettingError(f"{cls.__name__} settings must be a mapping, got {type(data).__name__}: {data!r}")
        values = dict(data)
        kind = values.pop("method", cls.kind)
        if kind != cls.kind:
            raise SettingError(f"these are settings of method {kind!r}, not of {cls.kind!r}")
        known = {field.name for field in fields(cls)}
        unknown = sorted(str(key) for key in values if key not in known)
        if unknown:
            raise SettingError(f"unknown setting(s) {', '.join(unknown)} for {cls.__name__}; known: {sorted(known)}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The inverse of `to_json`.

        Raises:
            SettingError: if the text is no JSON object, or its content is wrong.
        """
        try:
            data = json.loads(text)
        except (TypeError, ValueError) as error:
            raise SettingError(f"{cls.__name__} settings are not valid JSON: {error}") from error
        return cls.from_dict(data)


def share(name: str, value: Any) -> float:
    """`value` as a float in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    if not 0 <= value < 1:  # false for NaN, too; isfinite would overflow for huge integers
        raise SettingError(f"{name} must satisfy 0 <= {name} < 1, got {repr(value)[:40]} (one third is 1/3, not 33)")
    return float(value)


def flag(name: str, value: Any) -> bool:
    """`value` if it is a bool."""
    if not isinstance(value, bool):
        raise SettingError(f"{name} must be True or False, got {type(value).__name__}: {value!r}")
    return value


def choice(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    """`value` if it is one of the allowed words."""
    if not isinstance(value, str) or value not in allowed:
        raise SettingError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def count(name: str, value: Any, least: int = 1) -> int:
    """`value` if it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise SettingError(f"{name} must be an integer of at least {least}, got {value!r}")
    return value


def layer_indices(name: str, value: Any) -> tuple[int, ...]:
    """Zero-based layer indices as a sorted tuple."""
    for index in value:
        if isinstance(index, bool) or not isinstance(index, int):
            raise SettingError(f"{name} must list layer indices, integers; got {type(index).__name__}: {index!r}")
        if index < 0:
            raise SettingError(f"{name} counts layers from 0, an index cannot be negative: got {index}")
    if len(set(value)) != len(value):
        raise SettingError(f"{name} must not repeat an index, got {list(value)}")
    return tuple(sorted(value))


def layer_list(name: str, value: Any) -> tuple[int, ...]:
    """`layer_indices` of a list or tuple; anything else is refused."""
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise SettingError(f"{name} must list layer indices, got {type(value).__name__}")
    return layer_indices(name, value)
