"""`stageprune.json`: the settings of some methods in a file, which can lie beside a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from stageprune.errors import ResultFileError, SettingError
from stageprune.evaluate.fingerprint import check_identity, identity
from stageprune.methods import Method, OnlineChannelPruning, PrefillOnlyPruning
from stageprune.records import read_record, write_record

KIND, VERSION = "stageprune-settings", 1

_METHODS = {method.kind: method for method in (PrefillOnlyPruning, OnlineChannelPruning)}


@dataclass(frozen=True)
class SettingsFile:
    """What such a file holds.

    Attributes:
        methods: the settings, at most one of each kind.
        model: the model that they are for, as `identity` describes it; None: any.
        plan: how `stageprune plan` found them, as JSON-ready data; None if it did not.
    """

    methods: tuple[Method, ...]
    model: dict[str, Any] | None = None
    plan: dict[str, Any] | None = None

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all.

        Raises:
            OutputFileError: if that fails.
        """
        methods = [method.to_dict() for method in self.methods]
        write_record(Path(path), KIND, VERSION, {"methods": methods, "model": self.model, "plan": self.plan})

    @classmethod
    def load(cls, path: str | Path, model: nn.Module | None = None) -> SettingsFile:
        """Read what `save` wrote.

        Args:
            path: of the file.
            model: the model to use the settings with.

        Raises:
            ResultFileError: if the file is missing, damaged, truncated, of another kind or version, or of another model
                than `model`.
        """
        data = read_record(Path(path), KIND, VERSION)
        try:
            methods = tuple(map(_method, _checked(list, data["methods"])))
            found = cls(
                methods, _checked((dict, type(None)), data["model"]), _checked((dict, type(None)), data["plan"])
            )
            if len({method.kind for method in methods}) != len(methods):
                raise ValueError("it has a method twice")
        except KeyError as error:
            raise ResultFileError(f"{str(path)!r} is no complete {KIND} file: it lacks {error}") from error
        except (TypeError, ValueError) as error:
            raise ResultFileError(f"{str(path)!r} is no complete {KIND} file: {error}") from error
        if model is not None:
            found.check(model, path)
        return found

    def check(self, model: nn.Module, path: str | Path) -> None:
        """Refuse another model than the one that the settings are for.

        Raises:
            ResultFileError: names the file, which lies at `path`, and what differs.
        """
        if self.model is not None:
            check_identity(self.model, model, Path(path))


def save_settings(path: str | Path, *methods: Method, model: nn.Module | None = None) -> None:
    """Write settings to a file that `load_settings` and `--settings` read.

    Args:
        path: of the file, such as `stageprune.json`.
        methods: the settings.
        model: the model that they are for, the only one that they can then be used with; None: any.

    Raises:
        OutputFileError: if the file cannot be written.
        SettingError: if a method is no method, or given twice.
    """
    for method in methods:
        if type(method) not in _METHODS.values():
            raise SettingError(f"expected a method such as PrefillOnlyPruning(...), got {type(method).__name__}")
    kinds = [method.kind for method in methods]
    if len(set(kinds)) != len(kinds):
        raise SettingError(f"each method can be given once, got {', '.join(kinds)}")
    SettingsFile(methods, None if model is None else identity(model)).save(path)


def load_settings(path: str | Path, model: nn.Module | None = None) -> Sequence[Method]:
    """The methods in a file: `prune(model, *load_settings("stageprune.json", model))`.

    Args:
        path: of the file, which `save_settings` or `stageprune plan` wrote.
        model: the model to prune; refused if the settings are for another one. None: not checked.

    Raises:
        ResultFileError: if the file is missing, damaged, truncated, of another kind or version, or of another model.
    """
    return SettingsFile.load(path, model).methods


def settings_beside(model: str) -> Path | None:
    """The `stageprune.json` in a checkpoint's folder, where servers look for it; None if there is none.

    Also a folder of that name or a link that leads nowhere: reading it says so. Only local folders are looked into: a
    name on the hub would cost every start of any engine a request.
    """
    path = os.path.join(os.path.expanduser(model), "stageprune.json")
    return Path(path) if os.path.lexists(path) else None


def _method(data: Any) -> Method:
    kind = _checked(str, _checked(dict, data).get("method"))
    if kind not in _METHODS:
        raise ValueError(f"this stageprune knows no method {kind!r}")
    return _METHODS[kind].from_dict(data)


def _checked(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"unexpected {type(value).__name__} {value!r:.60}")
    return value
