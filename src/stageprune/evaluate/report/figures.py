"""Plots as SVG that lies inside a page: it takes the page's colours and fonts, and loads nothing."""

from __future__ import annotations

import hashlib
import io
import re
from collections.abc import Callable
from typing import Any, TypeAlias

from stageprune.errors import SettingError
from stageprune.evaluate.figure import new_figure
from stageprune.evaluate.report.document import Block, Figure

Draw: TypeAlias = Callable[[Any], object]
"""Draws into matplotlib axes."""

Drawing: TypeAlias = Callable[[Draw, str], list[Block]]
"""`draw_figure`, or `no_figure` for a format that has none."""

COLORS = ("#2f7ed8", "#e0782f", "#2a9d6f", "#b55fd0", "#c9a227", "#d9486e", "#5fa8a8", "#8a7b6b")
"""For series: each can be told apart on white and on nearly black."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

_INK = "#010203"
"""Stands for the page's text colour until `svg_of` replaces it; nothing else has this colour."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "stageprune",
    "text.parse_math": False,  # a dollar sign in a model's name is a dollar sign
    "font.size": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color"), _INK
    ),
    "grid.alpha": 0.15,
}


def check_plots() -> None:
    """Find out that plots can be drawn.

    Raises:
        SettingError: if matplotlib is missing.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError(
            "a report as HTML needs matplotlib for its plots; run: pip install 'stageprune[plots]', or take --format md"
        ) from error


def draw_figure(draw: Draw, caption: str) -> list[Block]:
    """A figure, 5 inches wide as a page on a phone is, of what `draw(axes)` draws.

    Raises:
        SettingError: if matplotlib is missing.
    """
    check_plots()
    import matplotlib as mpl

    with mpl.rc_context(_STYLE):
        figure = new_figure(5, 3.5)
        figure.patch.set_alpha(0)
        axes = figure.subplots()
        axes.grid(True)
        axes.set_axisbelow(True)
        draw(axes)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return [Figure(_inline(file.getvalue()), caption)]


def logarithmic(axes: Any) -> None:
    """Make the y axis logarithmic, with its numbers as `0.01`: powers of ten would need the markup that is off."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def no_figure(draw: Draw, caption: str) -> list[Block]:
    """In place of `draw_figure` where there are none."""
    return []


def _inline(svg: str) -> str:
    """Without what only a file of its own has, and with ids that no other picture of the page has."""
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"\s*<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height|xmlns(:xlink)?|version)="[^"]*"', "", head)
    svg = f"{head}>{rest}".replace(_INK, "currentColor").replace("xlink:href=", "href=")
    prefix = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-"
    return re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
