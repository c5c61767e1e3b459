"""The options about pruned channels, and the methods that all options together say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from torch import nn

from stageprune.cli import parse
from stageprune.cli.common import UsageProblem
from stageprune.cli.options import LayerOptions
from stageprune.errors import SettingError
from stageprune.methods import Method, OnlineChannelPruning
from stageprune.methods.online_channels import PRESETS, BackendName, Selection
from stageprune.settings_file import SettingsFile

ChannelRatio = Annotated[
    float | None,
    typer.Option(
        "--channel-ratio",
        parser=parse.ratio,
        metavar="R",
        show_default=False,
        help="Prune FFN channels for generated tokens: share of the attention and FFN weights not used, such as 0.2.",
    ),
]
ChannelRatios = Annotated[
    Any,
    typer.Option(
        "--channel-ratio",
        parser=parse.ratios,
        metavar="R,R,...",
        show_default=False,
        help="Prune FFN channels for generated tokens: shares of the attention and FFN weights not used, such as 0.2.",
    ),
]
PartitionFraction = Annotated[
    float | None,
    typer.Option(
        "--partition-fraction",
        parser=parse.fraction,
        metavar="G",
        show_default=False,
        help="Share of the channels among which each token chooses. Default: 0.1.",
    ),
]
SelectionRule = Annotated[
    Selection | None,
    typer.Option("--selection", show_default=False, help="How a token's channels are chosen. Default: partition."),
]
Preset = Annotated[
    str | None,
    typer.Option(
        "--channel-preset",
        parser=parse.preset,
        metavar="NAME",
        show_default=False,
        help=f"Named settings of channel pruning: {', '.join(PRESETS)}.",
    ),
]
Backend = Annotated[
    BackendName | None,
    typer.Option("--channel-backend", show_default=False, help="What runs pruned FFNs. Default: auto."),
]
Backends = Annotated[
    Any,
    typer.Option(
        "--channel-backend",
        parser=parse.backends,
        metavar="B,B,...",
        show_default=False,
        help=f"What runs pruned FFNs: {', '.join(get_args(BackendName))}. Default: auto.",
    ),
]

Others = Annotated[
    list[str] | None,
    typer.Option(
        "--channel-setting",
        metavar="NAME=VALUE",
        show_default=False,
        help="Any other setting of OnlineChannelPruning, such as scope=sequence, refresh=32, unseen=layer or "
        "shared_experts=true; repeat it for several.",
    ),
]

_OWN_OPTION = {
    "ratio": "--channel-ratio",
    "partition_fraction": "--partition-fraction",
    "selection": "--selection",
    "backend": "--channel-backend",
}


def channels_of(
    ratio: float | None,
    partition_fraction: float | None,
    selection: Selection | None,
    preset: str | None,
    backend: BackendName | None,
    others: Sequence[str] | None = None,
) -> OnlineChannelPruning | None:
    """The settings of channel pruning that the options say; None if no option is about channels.

    Raises:
        UsageProblem: if options contradict each other.
    """
    given: dict[str, Any] = {
        name: value
        for name, value in (
            ("ratio", ratio),
            ("partition_fraction", partition_fraction),
            ("selection", selection),
            ("backend", backend),
        )
        if value is not None
    }
    given |= _settings_of(others or ())
    if preset is None and not given:
        return None
    settings = OnlineChannelPruning.preset(preset or "paper")
    taken = {name for name in _OWN_OPTION if name != "backend"} | PRESETS.get(preset or "paper", {}).keys()
    fixed = [name for name in given if name in taken and preset not in (None, "paper")]
    if fixed:
        option = _OWN_OPTION.get(fixed[0], f"--channel-setting {fixed[0]}")
        raise UsageProblem(f"--channel-preset {preset} sets what {option} says, too; give one of them")
    try:
        return replace(settings, **given)
    except SettingError as error:
        raise UsageProblem(str(error)) from error


def _settings_of(texts: Sequence[str]) -> dict[str, object]:
    """Settings by name from `name=value`; values are JSON, or the words that they are."""
    known = [field.name for field in fields(OnlineChannelPruning) if field.name not in _OWN_OPTION]
    found: dict[str, object] = {}
    for text in texts:
        name, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not value:
            raise UsageProblem(f"--channel-setting takes NAME=VALUE, such as unseen=layer; got {text!r}")
        if name in _OWN_OPTION:
            raise UsageProblem(f"--channel-setting {text}: {_OWN_OPTION[name]} says that")
        if name not in known:
            raise UsageProblem(f"--channel-setting {text}: no such setting; known: {', '.join(known)}")
        if name in found:
            raise UsageProblem(f"--channel-setting gives {name} twice")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def methods_of(ratio: float | None, layers: LayerOptions, channels: OnlineChannelPruning | None) -> tuple[Method, ...]:
    """Both methods, or the one that options speak of; without any option, prefill-only pruning.

    Raises:
        UsageProblem: if options contradict each other.
        ResultFileError: if the file of importance scores, or the folder of projections, cannot be read.
    """
    if channels is None:
        return (layers.method(ratio),)
    if ratio is None and not layers.given:
        return (channels,)
    return (layers.method(ratio), channels)


def methods_or_file(
    settings: Path | None, ratio: float | None, layers: LayerOptions, channels: OnlineChannelPruning | None
) -> tuple[Method, ...]:
    """What `--settings` says, else `methods_of`.

    Raises:
        UsageProblem: if options contradict each other.
        ResultFileError: if a file cannot be read.
    """
    if settings is None:
        return methods_of(ratio, layers, channels)
    if ratio is not None or layers.given or channels is not None:
        raise UsageProblem("--settings says how to prune, so no other option about layers or channels can apply")
    return SettingsFile.load(settings).methods


def check_model(model: nn.Module, settings: Path | None, layers: LayerOptions) -> None:
    """Refuse files that were made for another model.

    Raises:
        ResultFileError: names the file and what differs.
    """
    layers.check(model)
    if settings is not None:
        SettingsFile.load(settings, model)


def grid_of(
    ratios: Sequence[float] | None,
    layers: LayerOptions,
    channel_ratios: Sequence[float] | None,
    channels: OnlineChannelPruning | None,
    backends: Sequence[BackendName] | None = None,
) -> list[tuple[Method, ...]]:
    """`methods_of` for every combination of several ratios and backends."""
    if channels is None:
        return [(layers.method(ratio),) for ratio in ratios or (None,)]
    variants = [replace(channels, ratio=ratio) for ratio in channel_ratios] if channel_ratios else [channels]
    variants = [replace(one, backend=backend) for one in variants for backend in backends or (one.backend,)]
    if ratios is None and layers.projections is None:
        return [(variant,) for variant in variants]
    methods = [layers.method(ratio) for ratio in ratios or (None,)]
    return [(method, variant) for method in methods for variant in variants]
