"""How to prune, from the arguments that evaluation harnesses hand on as text."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

from stageprune.errors import SettingError
from stageprune.evaluate.setting import Setting, setting_of
from stageprune.methods import Method, OnlineChannelPruning, PrefillOnlyPruning
from stageprune.settings_file import SettingsFile


def setting_of_arguments(
    prefill_ratio: float | str | None = None,
    channel_ratio: float | str | None = None,
    channel_preset: str | None = None,
    settings: str | None = None,
) -> Setting:
    """What the arguments say.

    Args:
        prefill_ratio: share of the layers that the prompt skips, such as 0.25 or `"1/3"`.
        channel_ratio: share of the attention and FFN weights that generated tokens do not use.
        channel_preset: instead, named settings of channel pruning.
        settings: instead of all three, the settings file that says how to prune.

    Raises:
        SettingError: if they contradict each other, or a value is wrong.
        ResultFileError: if the settings file cannot be read.
    """
    if settings is not None:
        if any(value is not None for value in (prefill_ratio, channel_ratio, channel_preset)):
            raise SettingError("settings and ratios each say how to prune; give one of them")
        return Setting(Path(settings).stem, SettingsFile.load(settings).methods)
    found: list[Method] = []
    if prefill_ratio is not None:
        found.append(PrefillOnlyPruning(_share("prefill_ratio", prefill_ratio)))
    if channel_preset is not None:
        if channel_ratio is not None:
            raise SettingError("channel_preset and channel_ratio each say how many channels to prune; give one of them")
        found.append(OnlineChannelPruning.preset(channel_preset))
    if channel_ratio is not None:
        found.append(OnlineChannelPruning(_share("channel_ratio", channel_ratio)))
    return setting_of(*found)


def _share(name: str, value: float | str) -> float:
    try:
        return float(Fraction(str(value)))
    except (ValueError, ZeroDivisionError) as error:
        raise SettingError(f"{name} must be a number or a fraction such as 1/3, got {value!r}") from error
