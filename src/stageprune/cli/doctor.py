"""`stageprune doctor`: what is installed, and whether a model can be pruned."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from stageprune.cli import channel_options, options, parse, show, vllm
from stageprune.cli.common import console, load_model, output, quiet


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="A hub id, a folder, a config.json, a .gguf file, or demo.", show_default=False)
    ] = None,
    ratio: options.Ratio = None,
    layers: options.Layers = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    channel_ratio: channel_options.ChannelRatio = None,
    lengths: Annotated[
        Any, typer.Option("--lengths", parser=parse.counts, metavar="N,N,...", help="Prompt lengths, in tokens.")
    ] = "128,512,2048,8192",
    images: Annotated[
        Any,
        typer.Option(
            "--images",
            parser=parse.image_sizes,
            metavar="WxH,...",
            help="Sizes in pixels, for models whose images can be counted from the configuration (Qwen-VL).",
        ),
    ] = "640x480,1280x720,1920x1080,2560x1440",
    verify: Annotated[
        bool, typer.Option("--verify", help="Load the model and check its layers as prune() does. demo always is.")
    ] = False,
    with_vllm: Annotated[
        bool,
        typer.Option("--vllm", help="Check that vLLM answers as the library does: MODEL's family, or all (minutes)."),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Show versions and devices; with MODEL, what each method can do for it and what that would gain.

    Without --verify only the configuration is read. Exit code 1 if no method can prune the model, or vLLM fails.
    """
    method = options.LayerOptions(layers, importance, contiguous).method(ratio)
    channels = channel_options.channels_of(0.2 if channel_ratio is None else channel_ratio, None, None, None, None)
    with console.status("looking around"):
        quiet()
        from stageprune.evaluate.system import system_info

        data: dict[str, Any] = {"system": {**system_info(), "compiler": _compiler(), "native_bfloat16": _bfloat16()}}
    support = None if model is None else _support(model, verify, method, channels, lengths, images)
    if support is not None:
        data["model"] = {"name": model, **support.to_dict()}
    results = _check_vllm(model) if with_vllm else []
    if results:
        data["vllm"] = [{**asdict(result), "right": result.right} for result in results]
    if as_json:
        typer.echo(json.dumps(data, indent=2))
    else:
        _show(data)
        for result in results:
            output.print(f"vLLM, {result}: {'right' if result.right else 'WRONG'}", markup=False, soft_wrap=True)
    if not all(result.right for result in results):
        raise typer.Exit(1)
    if support is not None and not (support.supported or support.channels.supported):
        raise typer.Exit(1)


def _check_vllm(name: str | None) -> Any:
    from stageprune.cli.configs import read_config
    from stageprune.models import folder_of
    from stageprune.serving.vllm.command import family_of
    from stageprune.serving.vllm_plugin import FAMILIES

    families = FAMILIES if name is None else (family_of(read_config(folder_of(name))),)
    return vllm.checked(*families, again=True)


def _support(name: str, verify: bool, *settings: Any) -> Any:
    """See `evaluate.support`; a loaded model is checked by pruning it."""
    from stageprune.evaluate.support import support_of_config, support_of_model
    from stageprune.pruning import prune

    if not verify and (name != "demo" or os.path.exists(name)):
        from stageprune.cli.configs import read_config

        with console.status("reading the configuration"):
            return support_of_config(read_config(name), *settings)
    from stageprune.errors import StagePruneError

    loaded = load_model(name, "auto", None)
    support = support_of_model(loaded.model, *settings)
    if support.supported:
        try:
            prune(loaded.model, settings[0]).remove()
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
    name, channels = model["name"], model["channels"]
    if not (model["supported"] or channels["supported"]):
        output.print(f"{name}: cannot be pruned. {model['reason']}", markup=False, soft_wrap=True)
        return
    checked = "its layers were checked" if model["verified"] else "by its structure; --verify loads and checks it"
    output.print(
        f"{name}: can be pruned ({checked})\n"
        f"{model['architecture']} ({model['kind']}), {model['parameters'] / 1e6:,.0f} M parameters",
        markup=False,
        soft_wrap=True,
    )
    for line in (*_prefill_lines(model), *_channel_lines(channels)):
        output.print(line, markup=False, soft_wrap=True)


def _prefill_lines(model: dict[str, Any]) -> Iterator[str]:
    if not model["supported"]:
        yield f"prefill-only pruning: not possible. {model['reason']}"
        return
    skipped = model["skipped_layers"]
    yield (
        f"prefill-only pruning: prompts skip {len(skipped)} of {model['num_hidden_layers']} layers "
        f"({options.shown(skipped)})"
    )
    yield f"  ideal speed-up of the first token by prompt length: {_by_length(model['ideal_speedups'])}"
    for image in model["images"]:
        yield (
            f"  image of {image['size']}, {image['tokens']:,} tokens with a question: "
            f"{show.factor(image['ideal_speedup'])} with the vision encoder ({image['vision_share']:.0%} of the work), "
            f"{show.factor(image['ideal_language_speedup'])} without"
        )


def _channel_lines(channels: dict[str, Any]) -> Iterator[str]:
    if not channels["supported"]:
        yield f"channel pruning: not possible. {channels['reason']}"
        return
    yield f"channel pruning: {channels['mlp_ratio']:.1%} of the FFN's channels are left out"
    if channels["ideal_ffn_speedup"] is None:
        yield f"  ideal speed-up of an image: {show.factor(channels['ideal_flops_speedup'])} (operations)"
        return
    yield (
        f"  ideal speed-up of a generated token by prompt length: {_by_length(channels['ideal_decode_speedups'])} "
        f"(bytes read); {show.factor(channels['ideal_flops_speedup'])} (operations); of the FFNs "
        f"{show.factor(channels['ideal_ffn_speedup'])}"
    )


def _by_length(values: dict[str, float]) -> str:
    return ", ".join(f"{show.factor(gain)} at {int(length):,}" for length, gain in values.items())


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
