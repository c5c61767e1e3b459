"""How generated tokens' channels relate to the prompt's ranking, as a picture (arXiv 2602.06822, Figure 2)."""

from __future__ import annotations

from pathlib import Path

from stageprune.channels.observe import mean_by_token
from stageprune.errors import SettingError
from stageprune.evaluate.figure import check_figure, new_figure, save_figure
from stageprune.report import Report


def plot_channels(report: Report, path: Path) -> None:
    """Draw what `handle.observe()` saw: ranks in the middle layer, and overlap and turnover over tokens and layers.

    Args:
        report: taken after `handle.observe()`.
        path: of the picture.

    Raises:
        SettingError: if nothing was observed.
        SettingError, OutputFileError: as `check_figure`.
    """
    layers = [part for part in report.channels if part.observed is not None]
    if not layers:
        raise SettingError("nothing was observed; generate some tokens inside handle.observe() first")
    check_figure(path)
    figure = new_figure(15, 4.2)
    heat, steps, depth = figure.subplots(1, 3)
    middle = layers[len(layers) // 2]
    assert middle.observed is not None
    image = heat.imshow(
        [list(column) for column in zip(*middle.observed.ranks, strict=True)],
        aspect="auto", cmap="viridis_r", vmin=0, vmax=1, origin="lower",
        extent=(0.5, middle.observed.tokens + 0.5, 0, 100),
    )  # fmt: skip
    heat.set(title=f"layer {middle.layer}: rank of channels", xlabel="generated token")
    heat.set_ylabel("channels by the prompt's ranking (%), best first")
    figure.colorbar(image, ax=heat, label="rank for this token / channels")

    overlap, difference = mean_by_token([part.observed for part in layers if part.observed is not None])
    tokens = range(1, len(overlap) + 1)
    steps.plot(tokens, overlap, label="best half: overlap with the prompt's")
    steps.plot(tokens, difference, label="mean distance of ranks / channels")
    steps.set(title=f"mean of {len(layers)} layers", xlabel="generated token", ylim=(0, 1))
    steps.legend()

    indices = [part.layer for part in layers]
    depth.plot(indices, [part.observed.mean_overlap for part in layers if part.observed], "o-", label="overlap")
    turnover = [(part.layer, part.observed.turnover) for part in layers if part.observed]
    changing = [(layer, share) for layer, share in turnover if share is not None]
    if changing:
        depth.plot(*zip(*changing, strict=True), "s-", label="turnover of a token's own choice")
    depth.set(title="mean of the generated tokens", xlabel="layer", ylim=(0, 1))
    depth.legend()
    save_figure(figure, path)
