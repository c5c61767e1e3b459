"""How generated tokens' channels relate to the prompt's ranking, as a picture (arXiv 2602.06822, Figure 2)."""

from __future__ import annotations

import io
from typing import Any

from stageprune.channels.observe import mean_by_token
from stageprune.errors import SettingError
from stageprune.report import Report


def pyplot() -> Any:
    """matplotlib, without a display.

    Raises:
        SettingError: if it is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise SettingError("plots need matplotlib: pip install 'stageprune[plots]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plot

    return plot


def plot_channels(report: Report, kind: str = "png") -> bytes:
    """Draw what `handle.observe()` saw: ranks in the middle layer, and overlap and turnover over tokens and layers.

    Args:
        report: taken after `handle.observe()`.
        kind: of picture: png, svg or pdf.

    Returns:
        The content of the file.

    Raises:
        SettingError: if nothing was observed, or matplotlib is missing.
    """
    layers = [part for part in report.channels if part.observed is not None]
    if not layers:
        raise SettingError("nothing was observed; generate some tokens inside handle.observe() first")
    plot = pyplot()
    figure, (heat, steps, depth) = plot.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
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
    file = io.BytesIO()
    figure.savefig(file, format=kind.lower(), dpi=150)
    plot.close(figure)
    return file.getvalue()
