"""The paper's two figures of a model: the importance of its layers in both stages, and the drift under pruning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from stageprune.evaluate.figure import check_figure, new_figure, save_figure
from stageprune.prefill.importance import Estimate, Importance

_STAGES = (("prefill", "tab:blue", "o"), ("decode", "tab:orange", "s"))
_DRIFTS = (
    ("hidden_states", "hidden states", "tab:blue", "--"),
    ("keys", "keys", "tab:purple", ":"),
    ("values", "values", "tab:green", "--"),
    ("attention", "attention output, decode", "tab:red", "-"),
)


def plot_importance(importance: Importance, path: Path) -> None:
    """Draw Figure 1 (importance, logarithmic, with standard errors) beside Figure 2 (cosine similarities).

    Raises:
        SettingError, OutputFileError: as `check_figure`.
    """
    check_figure(path)
    figure = new_figure(11, 4.2)
    left, right = figure.subplots(1, 2)
    _draw_scores(left, importance)
    _draw_drift(right, importance)
    count, name = len(importance.samples), importance.model.get("name", "")
    figure.suptitle(f"{name}: {count} samples, bars are standard errors")
    save_figure(figure, path)


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
