"""The paper's two figures of a model: the importance of its layers in both stages, and the drift under pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stageprune.errors import SettingError
from stageprune.files import OutputFileError
from stageprune.prefill.importance import Estimate, Importance

SUFFIXES = (".png", ".svg")

_STAGES = (("prefill", "tab:blue", "o"), ("decode", "tab:orange", "s"))
_DRIFTS = (
    ("hidden_states", "hidden states", "tab:blue", "--"),
    ("keys", "keys", "tab:purple", ":"),
    ("values", "values", "tab:green", "--"),
    ("attention", "attention output, decode", "tab:red", "-"),
)


def check_plotting(path: Path) -> None:
    """Find out before a long computation that its plot cannot be drawn.

    Raises:
        SettingError: if the file's name ends in something else than .png or .svg, or matplotlib is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise SettingError(f"a plot is a file that ends in {' or '.join(SUFFIXES)}, not {str(path)!r}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise SettingError("a plot needs matplotlib; run: pip install 'stageprune[plots]'") from error


def plot_importance(importance: Importance, path: Path) -> None:
    """Draw Figure 1 (importance, logarithmic, with standard errors) beside Figure 2 (cosine similarities).

    Raises:
        SettingError: as `check_plotting`.
        OutputFileError: if the file cannot be written.
    """
    check_plotting(path)
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "stageprune"}):  # else every SVG of the same data differs
        figure = Figure(figsize=(11, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_scores(left, importance)
        _draw_drift(right, importance)
        count, name = len(importance.samples), importance.model.get("name", "")
        figure.suptitle(f"{name}: {count} samples, bars are standard errors")
        try:
            # Not the file's format by its name: upper-case endings are fine, too.
            figure.savefig(path, format=path.suffix[1:].lower(), dpi=150, metadata=_undated(path))
        except OSError as error:
            raise OutputFileError(f"cannot write {str(path)!r}: {error.strerror}") from error


def _undated(path: Path) -> dict[str, None]:
    return {"Date": None} if path.suffix.lower() == ".svg" else {}


def _draw_scores(axes: Any, importance: Importance) -> None:
    for stage, color, marker in _STAGES:
        scores = importance.scores(stage)  # type: ignore[arg-type]
        # A logarithmic axis has no place for the last layer's 0.
        shown = [(layer, score) for layer, score in enumerate(scores) if score.mean > 0]
        _line(axes, shown, stage, color=color, marker=marker, markersize=3)
    axes.set_yscale("log")
    axes.set(title="Importance of layers by stage", xlabel="layer", ylabel="mean squared gate gradient")
    axes.legend()
    axes.grid(alpha=0.3)


def _draw_drift(axes: Any, importance: Importance) -> None:
    layers = importance.drift_layers
    for what, label, color, style in _DRIFTS:
        _line(axes, list(zip(layers, importance.drift(what), strict=True)), label, color=color, linestyle=style)
    title = f"Layers {layers.start}-{layers.stop - 1} skipped in prefill" if len(layers) else "No layer skipped"
    axes.set(title=title, xlabel="layer", ylabel="cosine similarity to the full model")
    axes.legend()
    axes.grid(alpha=0.3)


def _line(axes: Any, points: list[tuple[int, Estimate]], label: str, **style: Any) -> None:
    means = [estimate.mean for _, estimate in points]
    errors = [estimate.standard_error or 0.0 for _, estimate in points]
    # Means of squares are positive; a bar that reaches 0 would have no end on a logarithmic axis.
    lower = [min(error, 0.99 * mean) if mean > 0 else error for mean, error in zip(means, errors, strict=True)]
    axes.errorbar([x for x, _ in points], means, yerr=[lower, errors], label=label, capsize=2, linewidth=1.4, **style)
