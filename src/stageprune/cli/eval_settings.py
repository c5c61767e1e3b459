"""The rows of an evaluation, from the options that say how to prune."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from stageprune.cli import channel_options, options
from stageprune.cli.common import UsageProblem
from stageprune.methods import OnlineChannelPruning
from stageprune.settings_file import SettingsFile

if TYPE_CHECKING:
    from stageprune.evaluate.setting import Setting


def settings_of(
    ratios: Sequence[float] | None,
    layers: options.LayerOptions,
    channel_ratios: Sequence[float] | None,
    channels: OnlineChannelPruning | None,
    files: Sequence[Path],
) -> tuple[Setting, ...]:
    """Every combination of the ratios, and what the files say, each once; of files alone no other.

    Raises:
        UsageProblem: if options contradict each other, or leave nothing to measure.
        ResultFileError: if a file cannot be read.
    """
    from stageprune.evaluate.setting import Setting, distinct, setting_of

    found = []
    if not files or ratios is not None or layers.given or channels is not None:
        grid = channel_options.grid_of(ratios, layers, channel_ratios, channels)
        found += [setting_of(*methods) for methods in grid]
    found += [Setting(file.stem, SettingsFile.load(file).methods) for file in files]
    settings = distinct(found)
    if not settings:
        raise UsageProblem("nothing to measure: all these settings leave the model dense")
    return settings


def check_files(model: nn.Module, layers: options.LayerOptions, files: Sequence[Path]) -> None:
    """Refuse files that were made for another model.

    Raises:
        ResultFileError: names the file and what differs.
    """
    layers.check(model)
    for file in files:
        SettingsFile.load(file, model)
