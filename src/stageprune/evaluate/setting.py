"""One row of an evaluation: methods to prune with, under a name."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from stageprune.baselines import Baseline
from stageprune.evaluate.text import calibration_prompts
from stageprune.methods import Method, OnlineChannelPruning, PrefillOnlyPruning
from stageprune.pruning import Handle, prune
from stageprune.records import digest

CALIBRATION_TEXTS, CALIBRATION_TOKENS = 32, 256
"""Of the built-in text, for baselines that need some."""


@dataclass(frozen=True)
class Setting:
    """What to measure.

    Attributes:
        name: as tables show it.
        methods: the settings; none: the dense model.
        calibration: token ids of the prompts for methods that fit themselves to some text; None for others.
    """

    name: str
    methods: tuple[Method, ...]
    calibration: Sequence[Sequence[int]] | None = None

    def attach(self, model: Any) -> Handle:
        """Prune a model.

        Raises:
            SettingError, UnsupportedModelError, ResultFileError: as `prune` does.
        """
        handle: Handle = prune(model, *self.methods, calibration=self.calibration)
        return handle

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready data, with a checksum in place of the calibration prompts."""
        return {
            "name": self.name,
            "methods": [json.loads(method.to_json()) for method in self.methods],
            "calibration": None if self.calibration is None else digest([list(ids) for ids in self.calibration]),
        }


DENSE = Setting("dense", ())


def setting_of(*methods: Method) -> Setting:
    """A setting under the name that its methods suggest; methods with a ratio of 0 are left out."""
    kept = tuple(method for method in methods if not _is_nothing(method))
    return Setting(" + ".join(map(_name, kept)), kept) if kept else DENSE


def with_calibration(settings: Sequence[Setting], tokenizer: Any) -> tuple[Setting, ...]:
    """The same, with the built-in calibration text for the baselines that need some."""
    if not any(map(_needs_calibration, settings)):
        return tuple(settings)
    texts = calibration_prompts(tokenizer, CALIBRATION_TEXTS, CALIBRATION_TOKENS)
    return tuple(replace(one, calibration=texts) if _needs_calibration(one) else one for one in settings)


def _needs_calibration(setting: Setting) -> bool:
    return any(isinstance(method, Baseline) and method.needs_calibration for method in setting.methods)


def distinct(settings: Sequence[Setting]) -> tuple[Setting, ...]:
    """Each setting once, and each name, too: others of the same name get a number. The dense model is left out."""
    found: list[Setting] = []
    for setting in settings:
        if setting.methods and all(setting.methods != other.methods for other in found):
            found.append(setting)
    taken: set[str] = {DENSE.name}
    for place, setting in enumerate(found):
        name, number = setting.name, 1
        while name in taken:
            number += 1
            name = f"{setting.name} ({number})"
        taken.add(name)
        found[place] = replace(setting, name=name)
    return tuple(found)


def _is_nothing(method: Method) -> bool:
    if isinstance(method, PrefillOnlyPruning):
        return (isinstance(method.layers, str) and method.ratio == 0) or method.layers == ()
    if isinstance(method, OnlineChannelPruning):
        return method.ratio == 0 and method.mlp_ratio is None and method.ratios is None
    return False


def _name(method: Method) -> str:
    if isinstance(method, PrefillOnlyPruning):
        return _prefill_name(method)
    if isinstance(method, OnlineChannelPruning):
        return _channels_name(method)
    ratio = getattr(method, "ratio", None)
    return method.kind if ratio is None else f"{method.kind} {ratio:.3g}"


def _prefill_name(method: PrefillOnlyPruning) -> str:
    rule: list[str] = []
    if isinstance(method.layers, str):
        what = f"{method.ratio:.3g}"
        rule += [] if method.layers == "last" else [method.layers]
    else:
        what = _runs(method.layers)
    rule += [] if method.projections is None else ["fitted"]
    rule += [] if method.contiguous else ["free"]
    rule += [] if method.kv_projection else ["no K/V"]
    rule += [] if method.boundary else ["no boundary rule"]
    return f"layers {what}{_in_brackets(rule)}"


def _channels_name(method: OnlineChannelPruning) -> str:
    share = method.ratio if method.mlp_ratio is None else method.mlp_ratio
    what = "layer by layer" if method.ratios is not None else f"{share:.3g}"
    details = [] if method.mlp_ratio is None else ["of the FFN"]
    details += [] if method.selection == "partition" else [method.selection]
    details += [] if method.partition_fraction == 0.1 else [f"γ {method.partition_fraction:.3g}"]
    return f"channels {what}{_in_brackets(details)}"


def _in_brackets(details: Sequence[str]) -> str:
    return f" ({', '.join(details)})" if details else ""


def _runs(layers: Sequence[int]) -> str:
    """Indices with runs as ranges, such as `3, 20-29`."""
    parts = []
    for _, group in groupby(enumerate(layers), lambda pair: pair[1] - pair[0]):
        run = [index for _, index in group]
        parts.append(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}")
    return ",".join(parts)
