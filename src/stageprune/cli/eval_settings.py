"""The rows of an evaluation, from the options that say how to prune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from torch import nn

from stageprune.cli import channel_options, options, parse
from stageprune.cli.common import UsageProblem
from stageprune.methods import Method, OnlineChannelPruning
from stageprune.settings_file import SettingsFile

if TYPE_CHECKING:
    from stageprune.evaluate.setting import Setting


def settings_of(
    ratios: Sequence[float] | None,
    layers: options.LayerOptions,
    channel_ratios: Sequence[float] | None,
    channels: OnlineChannelPruning | None,
    files: Sequence[Path],
    baselines: Sequence[str],
) -> tuple[Setting, ...]:
    """Every combination of the ratios, what the files say and the baselines, each once; of those two alone no other.

    Raises:
        UsageProblem: if options contradict each other, or leave nothing to measure.
        ResultFileError: if a file cannot be read.
    """
    from stageprune.evaluate.setting import Setting, distinct, setting_of

    found = []
    if not (files or baselines) or ratios is not None or layers.given or channels is not None:
        grid = channel_options.grid_of(ratios, layers, channel_ratios, channels)
        found += [setting_of(*methods) for methods in grid]
    found += [Setting(file.stem, SettingsFile.load(file).methods) for file in files]
    found += [setting_of(_baseline(text)) for text in baselines]
    settings = distinct(found)
    if not settings:
        raise UsageProblem("nothing to measure: all these settings leave the model dense")
    return settings


def _baseline(text: str) -> Method:
    """From `NAME` or `NAME=RATIO`."""
    from stageprune.baselines import BASELINES

    name, equals, ratio = (part.strip() for part in text.partition("="))
    if name not in BASELINES:
        raise UsageProblem(f"--baseline {text}: no such baseline; known: {', '.join(BASELINES)}")
    try:
        return BASELINES[name](**({"ratio": parse.ratio(ratio)} if equals else {}))
    except typer.BadParameter as error:
        raise UsageProblem(f"--baseline {text}: {error.message}") from error


def check_files(model: nn.Module, layers: options.LayerOptions, files: Sequence[Path]) -> None:
    """Refuse files that were made for another model.

    Raises:
        ResultFileError: names the file and what differs.
    """
    layers.check(model)
    for file in files:
        SettingsFile.load(file, model)
