"""The settings of each method: frozen dataclasses, validated on construction, that round-trip through JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal, Self, TypeAlias, get_args

from stageprune.errors import SettingError

LayerRule: TypeAlias = Literal["last", "first", "interleaved"]


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


@dataclass(frozen=True)
class PrefillOnlyPruning(Method):
    """Skip deep layers while the prompt is encoded; only their keys and values are projected (arXiv 2602.03295).

    The last prompt token and every generated token go through the full model.

    Args:
        ratio: share of the decoder layers to skip, 0 <= ratio < 1; the count is `floor(ratio * num_hidden_layers)`,
            which gives the paper's 10 of 32, 12 of 36 and 16 of 48. Not used when `layers` lists indices.
        layers: which layers: `"last"` (the paper's rule), `"first"` or `"interleaved"` (its ablations, Table 3), or
            explicit zero-based indices.
        kv_projection: `False` writes no keys and values for the skipped layers ("w/o independent KV projections",
            Table 3): an ablation, for single prompts on a dynamic cache.
        boundary: `False` sends the last prompt token through the pruned model as well ("w/o boundary handling",
            Table 3): an ablation.

    Raises:
        SettingError: on a wrong type or value.
    """

    kind: ClassVar[str] = "prefill-only-pruning"

    ratio: float = 1 / 3
    layers: LayerRule | Sequence[int] = "last"
    kv_projection: bool = True
    boundary: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", _ratio("ratio", self.ratio))
        object.__setattr__(self, "layers", _layer_choice(self.layers))
        for name in ("kv_projection", "boundary"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise SettingError(f"{name} must be True or False, got {type(value).__name__}: {value!r}")


def _ratio(name: str, value: Any) -> float:
    """`value` as a float in [0, 1)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingError(f"{name} must be a number, got {type(value).__name__}: {value!r}")
    if not math.isfinite(value) or not 0 <= value < 1:
        raise SettingError(f"{name} must satisfy 0 <= {name} < 1, got {value!r} (one third is 1/3, not 33)")
    return float(value)


def _layer_choice(value: Any) -> LayerRule | tuple[int, ...]:
    """A rule's name unchanged, or explicit indices as a sorted tuple."""
    if isinstance(value, str):
        if value in get_args(LayerRule):
            return value  # type: ignore[return-value]
        raise SettingError(f"layers must be one of {get_args(LayerRule)} or a list of layer indices, got {value!r}")
    if not isinstance(value, Sequence):
        raise SettingError(
            f"layers must be one of {get_args(LayerRule)} or a list of layer indices, got {type(value).__name__}"
        )
    for index in value:
        if isinstance(index, bool) or not isinstance(index, int):
            raise SettingError(f"layer indices must be integers, got {type(index).__name__}: {index!r}")
        if index < 0:
            raise SettingError(f"layer indices count from 0 and cannot be negative, got {index}")
    if len(set(value)) != len(value):
        raise SettingError(f"layer indices must not repeat, got {list(value)}")
    return tuple(sorted(value))
