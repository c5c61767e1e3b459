"""`stageprune doctor`: what is installed, and whether a model can be pruned."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stageprune.cli import options, show
from stageprune.cli.common import console, load_model, output, quiet


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder, a config.json, a .gguf file, or demo.", show_default=False)
    ] = None,
    ratio: options.Ratio = None,
    layers: options.Layers = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the model and check its layers as prune() does. demo always is.")
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show versions and devices; with MODEL, whether it can be pruned and what that would gain.

    Without --verify only the configuration is read. Exit code 1 if the model cannot be pruned.
    """
    method = options.LayerOptions(layers, importance, contiguous).method(ratio)
    with console.status("looking around"):
        quiet()
        from stageprune.evaluate.system import system_info

        data: dict[str, Any] = {"system": {**system_info(), "compiler": _compiler(), "native_bfloat16": _bfloat16()}}
    support = None if model is None else _support(model, method, verify)
    if support is not None:
        data["model"] = {"name": model, **support.to_dict()}
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        _show(data)
    if support is not None and not support.supported:
        raise typer.Exit(1)


def _support(name: str, method: Any, verify: bool) -> Any:
    """See `evaluate.support`; a loaded model is checked by pruning it."""
    from stageprune.evaluate.support import support_of_config, support_of_model
    from stageprune.pruning import prune

    if not verify and (name != "demo" or os.path.exists(name)):
        from stageprune.cli.configs import read_config

        with console.status("reading the configuration"):
            return support_of_config(read_config(name), method)
    from stageprune.errors import StagePruneError

    loaded = load_model(name, "auto", None)
    support = support_of_model(loaded.model, method)
    if support.supported:
        try:
            prune(loaded.model, method).remove()
        except StagePruneError as error:
            return replace(support, supported=False, verified=True, reason=str(error))
        return replace(support, verified=True)
    return support


def _show(data: dict[str, Any]) -> None:
    table = Table(show_header=False, box=None)
    for name, value in data["system"].items():
        table.add_row(name.replace("_", " "), Text(_shown(value)))
    output.print(table)
    model = data.get("model")
    if model is None:
        return
    output.print()
    if not model["supported"]:
        output.print(f"{model['name']}: cannot be pruned. {model['reason']}", markup=False, soft_wrap=True)
        return
    skipped = model["skipped_layers"]
    checked = "its layers were checked" if model["verified"] else "by its structure; --verify loads and checks it"
    output.print(
        f"{model['name']}: can be pruned ({checked})\n"
        f"{model['architecture']}, {model['parameters'] / 1e6:,.0f} M parameters; prompts skip {len(skipped)} of "
        f"{model['num_hidden_layers']} layers ({options.shown(skipped)})",
        markup=False,
        soft_wrap=True,
    )
    ideal = ", ".join(f"{show.factor(gain)} at {int(length):,}" for length, gain in model["ideal_speedups"].items())
    output.print(f"ideal speed-up of the first token by prompt length: {ideal}", soft_wrap=True)


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value) or "none"
    return "not installed" if value is None else str(value)


def _compiler() -> str | None:
    """The C compiler that torch.compile would use on the CPU, by name."""
    named = os.environ.get("CXX")
    found = next((name for name in (named, "g++", "clang++", "c++", "cl") if name and shutil.which(name)), None)
    return None if found is None else os.path.basename(found)


def _bfloat16() -> bool:
    """Whether matrix products in bfloat16 run natively on the CPU."""
    import torch

    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
