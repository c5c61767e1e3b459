"""Drawing into a file: found out beforehand whether it can be done, and written whole or not at all."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from stageprune.errors import SettingError
from stageprune.files import check_writable, write_file

SUFFIXES = (".png", ".svg", ".pdf")


def check_figure(path: Path) -> None:
    """Find out before a long computation that its figure cannot be drawn.

    Raises:
        SettingError: if the name does not say one of the formats, or matplotlib is missing.
        OutputFileError: if the file cannot be written.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"a plot is a file that ends in {', '.join(SUFFIXES)}, not {str(path)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError("a plot needs matplotlib; run: pip install 'stageprune[plots]'") from error
    check_writable(path)


def new_figure(width: float, height: float) -> Any:
    """A matplotlib figure of this size in inches; no display is needed."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure in the format that the name says; the same data gives the same file.

    Raises:
        SettingError, OutputFileError: as `check_figure`.
    """
    check_figure(path)
    import matplotlib as mpl

    kind, file = path.suffix[1:].lower(), io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with mpl.rc_context({"svg.hashsalt": "stageprune"}):
        figure.savefig(file, format=kind, dpi=150, metadata=undated)
    write_file(path, file.getvalue())
