"""`stageprune bench`: speed over prompt lengths, batch sizes and ratios."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from stageprune.cli import bench_tables, channel_options, options, parse, prompts, show
from stageprune.cli.command_line import command_line
from stageprune.cli.common import (
    UsageProblem,
    check_outputs,
    console,
    load_model,
    output,
    progress,
    set_threads,
    shown_name,
)
from stageprune.files import write_file
from stageprune.methods import Method, OnlineChannelPruning
from stageprune.methods.online_channels import BackendName

if TYPE_CHECKING:
    from stageprune.models import LoadedModel

KIND = "stageprune-bench"
"""Of the result file."""

DECODE_TOKENS = 33
"""Generated to measure decoding: the first, and 32 that count."""

MOST_TOKENS = 2**24
"""In one call; no machine has the memory for more."""


def bench(
    model: options.Model = "demo",
    lengths: Annotated[
        Any, typer.Option("--lengths", parser=parse.counts, metavar="N,N,...", help="Prompt lengths, in tokens.")
    ] = "32,128,512,2048",
    batch: Annotated[
        Any, typer.Option("--batch", parser=parse.counts, metavar="B,B,...", help="Prompts at a time.")
    ] = "1",
    ratios: Annotated[
        Any,
        typer.Option(
            "--ratios",
            "-r",
            parser=parse.ratios,
            metavar="R,R,...",
            show_default=False,
            help="Shares of the layers to skip. Default: 1/3, or none with options about channels.",
        ),
    ] = None,
    layers: options.LayersByRule = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    projections: options.Projections = None,
    settings: options.Settings = None,
    channel_ratio: channel_options.ChannelRatios = None,
    partition_fraction: channel_options.PartitionFraction = None,
    selection: channel_options.SelectionRule = None,
    channel_preset: channel_options.Preset = None,
    channel_backend: channel_options.Backends = None,
    channel_setting: channel_options.Others = None,
    what: Annotated[
        Literal["prefill", "decode", "answer", "all", "ffn"],
        typer.Option(
            "--what",
            help="The time to the first token and its memory, the tokens after it, whole answers, or all of that; ffn: "
            "single pruned FFNs of the shapes that --shapes names, without a model.",
        ),
    ] = "prefill",
    new_tokens: Annotated[
        Any,
        typer.Option(
            "--new-tokens",
            parser=parse.count,
            metavar="N",
            show_default=str(DECODE_TOKENS),
            help="Length of the answers, for all but --what prefill and ffn.",
        ),
    ] = None,
    profile: Annotated[
        bool, typer.Option("--profile", help="Also split the time into attention, FFNs and the rest.")
    ] = False,
    peers: Annotated[
        Any,
        typer.Option(
            "--peers",
            parser=parse.peers,
            metavar="P,P,...",
            show_default=False,
            help="Also measure the dense model in others' hands: compile (torch.compile), vllm, llama.cpp; where they "
            "are installed.",
        ),
    ] = None,
    shapes: Annotated[
        Any,
        typer.Option(
            "--shapes", parser=parse.shapes, metavar="DxH,...", help="hidden x intermediate sizes for --what ffn."
        ),
    ] = "896x4864,2048x8192,4096x14336",
    repeats: Annotated[
        Any,
        typer.Option("--repeats", parser=parse.count, metavar="N", help="Pairs of dense and pruned turns, at least."),
    ] = "5",
    seconds: Annotated[
        Any,
        typer.Option(
            "--seconds",
            parser=parse.seconds,
            metavar="S",
            help="To spend on each row, at least: steadier short prompts.",
        ),
    ] = "3",
    dtype: options.Dtype = "bfloat16",
    device: options.Device = None,
    threads: options.Threads = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the results as JSON; - prints nothing but them.")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", help="Write the results as a table for spreadsheets.")
    ] = None,
) -> None:
    """Measure the speed-up over a grid. Dense and pruned turns alternate in one process, on the same prompts."""
    json_path = None if json_file in (None, "-") else Path(str(json_file))
    paths = check_outputs({"--json": json_path, "--csv": csv_file})
    if max(batch) * max(lengths) > MOST_TOKENS:
        raise UsageProblem(
            f"{max(batch)} prompts of {max(lengths)} tokens are more than {MOST_TOKENS} tokens at a time"
        )
    backend = channel_backend[0] if channel_backend else None
    channels = channel_options.channels_of(
        channel_ratio[0] if channel_ratio else None,
        partition_fraction,
        selection,
        channel_preset,
        backend,
        channel_setting,
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    if what == "ffn" and (settings is not None or layer_options.given):
        raise UsageProblem("--what ffn measures single FFNs without a model: no option about layers or files can apply")
    if what == "ffn" and (profile or peers or new_tokens):
        raise UsageProblem("--what ffn measures single FFNs: --profile, --peers and --new-tokens cannot apply")
    if what == "prefill" and new_tokens:
        raise UsageProblem("--what prefill generates one token: for --new-tokens take --what decode, answer or all")
    if what in ("decode", "answer", "all") and new_tokens == 1:
        raise UsageProblem(f"--what {what} needs at least two --new-tokens")
    if settings is None:
        grid = channel_options.grid_of(ratios, layer_options, channel_ratio, channels, channel_backend)
    else:
        grid = [channel_options.methods_or_file(settings, ratios and ratios[0], layer_options, channels)]
    set_threads(threads)
    if what == "ffn":
        data, tables = _measure_ffns(
            shapes, channels, channel_ratio, channel_backend, batch, dtype, device, repeats, seconds
        )
    else:
        loaded = load_model(model, dtype, device)
        channel_options.check_model(loaded.model, settings, layer_options)
        tokens = 1 if what == "prefill" else new_tokens or DECODE_TOKENS
        what_else = _Extra(profile, peers or (), model)
        data, tables = _measure_model(loaded, lengths, grid, batch, what, tokens, repeats, seconds, what_else)
    if csv_file is not None:
        write_file(csv_file, bench_tables.as_csv(data["cells"]))
    if json_path is not None:
        write_file(json_path, json.dumps(data, indent=2) + "\n")
    if json_file == "-":
        typer.echo(json.dumps(data, indent=2))
        return
    output.print(bench_tables.headline(data), markup=False, soft_wrap=True)
    for table in tables:
        output.print(table, soft_wrap=True)
    for path in paths:
        console.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)


@dataclass(frozen=True)
class _Extra:
    """What is measured besides: parts of the time, and peers, which load `source` themselves."""

    profile: bool
    peers: Sequence[str]
    source: str


def _measure_model(
    loaded: LoadedModel,
    lengths: Sequence[int],
    settings: Sequence[Sequence[Method]],
    batches: Sequence[int],
    what: str,
    new_tokens: int,
    repeats: int,
    seconds: float,
    extra: _Extra,
) -> tuple[dict[str, Any], list[Table | str]]:
    from stageprune.evaluate.grid import Grid, run_grid
    from stageprune.evaluate.peers.run import run_peers
    from stageprune.evaluate.system import system_info

    for length in lengths:
        prompts.check_fits(loaded.model, length, new_tokens, "--new-tokens")
    first = what in ("prefill", "all")
    grid = Grid(lengths, settings, batches, first, new_tokens, repeats, seconds, extra.profile)
    turns = 2 * repeats * (grid.cells + len(extra.peers) * len(lengths) * len(batches))
    with progress("measuring", turns) as step:
        cells = list(run_grid(loaded.model, loaded.tokenizer, grid, step))
        found = list(run_peers(extra.peers, loaded.model, loaded.tokenizer, extra.source, grid, step))
    data = {
        "kind": KIND,
        "command": command_line(),
        "model": shown_name(extra.source),
        "architecture": type(loaded.model).__name__,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "attention": loaded.model.config._attn_implementation,
        "system": system_info(),
        "cells": [cell.to_dict() for cell in cells],
        "peers": [peer.to_dict() for peer in found],
    }
    tables: list[Table | str] = []
    if first:
        tables.append(bench_tables.first_tokens(cells))
    if what in ("decode", "all"):
        tables.append(bench_tables.generation(cells))
    if what in ("answer", "all"):
        tables.append(bench_tables.answers(cells))
    if extra.profile:
        tables.append(bench_tables.profiles(cells))
    if found:
        tables += bench_tables.peers(found)
    if any(cell.is_wide for cell in cells):
        tables.append(show.BUSY)
    return data, tables


def _measure_ffns(
    shapes: Sequence[tuple[int, int]],
    channels: OnlineChannelPruning | None,
    ratios: Sequence[float] | None,
    backends: Sequence[BackendName] | None,
    batches: Sequence[int],
    dtype: str,
    device: str | None,
    repeats: int,
    seconds: float,
) -> tuple[dict[str, Any], list[Table | str]]:
    import torch

    from stageprune.evaluate.ffn_speed import ffn_speed
    from stageprune.evaluate.system import system_info

    if dtype == "auto":
        dtype = "bfloat16"
    base = channels or OnlineChannelPruning()
    settings = [base] if base.mlp_ratio is not None else [replace(base, mlp_ratio=ratio) for ratio in ratios or (0.3,)]
    settings = [replace(one, backend=backend) for one in settings for backend in backends or (one.backend,)]
    results = []
    with progress("measuring", 2 * (repeats + 1) * len(shapes) * len(settings) * len(batches)) as step:
        for (hidden_size, intermediate_size), method, rows in product(shapes, settings, batches):
            speed = ffn_speed(
                hidden_size,
                intermediate_size,
                method,
                dtype=getattr(torch, dtype),
                device=device or "cpu",
                rows=rows,
                pairs=repeats,
                seconds=seconds,
                on_pass=step,
            )
            results.append((method, speed))
    data = {
        "kind": KIND,
        "command": command_line(),
        "model": "single FFNs with random weights",
        "dtype": dtype,
        "device": device or "cpu",
        "system": system_info(),
        "cells": [{"method": method.to_dict(), **result.to_dict()} for method, result in results],
    }
    table = bench_tables.ffns(results)
    busy = any(result.dense_s.is_wide or result.pruned_s.is_wide for _, result in results)
    return data, [table, *([show.BUSY] if busy else [])]
