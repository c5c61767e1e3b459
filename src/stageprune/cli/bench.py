"""`stageprune bench`: speed over prompt lengths, batch sizes and ratios."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from stageprune.cli import channel_options, options, parse, prompts, show
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

if TYPE_CHECKING:
    from stageprune.evaluate.grid import Cell
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
    layers: Annotated[
        Literal["last", "first", "interleaved", "importance"] | None,
        typer.Option("--layers", help="Which layers. Default: last.", show_default=False),
    ] = None,
    importance: options.Importance = None,
    contiguous: options.Contiguous = None,
    projections: options.Projections = None,
    settings: options.Settings = None,
    channel_ratio: channel_options.ChannelRatios = None,
    partition_fraction: channel_options.PartitionFraction = None,
    selection: channel_options.SelectionRule = None,
    channel_preset: channel_options.Preset = None,
    channel_backend: channel_options.Backend = None,
    channel_setting: channel_options.Others = None,
    what: Annotated[
        Literal["prefill", "decode", "all", "ffn"],
        typer.Option(
            "--what",
            help="The time to the first token and its memory, the tokens after it, or both; ffn: single pruned FFNs of "
            "the shapes that --shapes names, without a model.",
        ),
    ] = "prefill",
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
    channels = channel_options.channels_of(
        channel_ratio[0] if channel_ratio else None,
        partition_fraction,
        selection,
        channel_preset,
        channel_backend,
        channel_setting,
    )
    layer_options = options.LayerOptions(layers, importance, contiguous, projections)
    if what == "ffn" and (settings is not None or layer_options.given):
        raise UsageProblem("--what ffn measures single FFNs without a model: no option about layers or files can apply")
    if settings is None:
        grid = channel_options.grid_of(ratios, layer_options, channel_ratio, channels)
    else:
        grid = [channel_options.methods_or_file(settings, ratios and ratios[0], layer_options, channels)]
    set_threads(threads)
    if what == "ffn":
        data, tables = _measure_ffns(shapes, channels, channel_ratio, batch, dtype, device, repeats, seconds)
    else:
        loaded = load_model(model, dtype, device)
        channel_options.check_model(loaded.model, settings, layer_options)
        data, tables = _measure_model(loaded, shown_name(model), lengths, grid, batch, what, repeats, seconds)
    if csv_file is not None:
        write_file(csv_file, _csv(data["cells"]))
    if json_path is not None:
        write_file(json_path, json.dumps(data, indent=2) + "\n")
    if json_file == "-":
        typer.echo(json.dumps(data, indent=2))
        return
    output.print(_headline(data), markup=False, soft_wrap=True)
    for table in tables:
        output.print(table, soft_wrap=True)
    for path in paths:
        console.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)


def _measure_model(
    loaded: LoadedModel,
    name: str,
    lengths: Sequence[int],
    settings: Sequence[Sequence[Method]],
    batches: Sequence[int],
    what: str,
    repeats: int,
    seconds: float,
) -> tuple[dict[str, Any], list[Table | str]]:
    from stageprune.evaluate.grid import Grid, run_grid
    from stageprune.evaluate.system import system_info

    new_tokens = 1 if what == "prefill" else DECODE_TOKENS
    for length in lengths:
        prompts.check_fits(loaded.model, length, new_tokens)
    grid = Grid(lengths, settings, batches, what != "decode", new_tokens, repeats, seconds)
    with progress("measuring", 2 * repeats * grid.cells) as step:
        cells = list(run_grid(loaded.model, loaded.tokenizer, grid, step))
    data = {
        "kind": KIND,
        "command": command_line(),
        "model": name,
        "architecture": type(loaded.model).__name__,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "attention": loaded.model.config._attn_implementation,
        "system": system_info(),
        "cells": [cell.to_dict() for cell in cells],
    }
    tables: list[Table | str] = []
    if what != "decode":
        tables.append(_prefill_table(cells))
    if what != "prefill":
        tables.append(_decode_table(cells))
    if any(cell.is_wide for cell in cells):
        tables.append(show.BUSY)
    return data, tables


def _measure_ffns(
    shapes: Sequence[tuple[int, int]],
    channels: OnlineChannelPruning | None,
    ratios: Sequence[float] | None,
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
    table = Table(title="one FFN, a generated token", title_justify="left")
    names = ("shape", "MLP ratio", "rows", "backend", "dense", "pruned", "speed-up", "quartiles", "ideal", "achieved")
    for name in (*names, "preparation"):
        table.add_column(name, justify="right")
    for method, result in results:
        table.add_row(
            f"{result.hidden_size} x {result.intermediate_size}",
            f"{method.mlp_ratio or 0:.3g}",
            str(result.rows),
            result.backend,
            show.seconds(result.dense_s.median),
            show.seconds(result.pruned_s.median),
            show.factor(result.speedup.median),
            show.quartiles(result.speedup),
            show.factor(result.ideal_speedup),
            f"{result.achieved:.0%}",
            show.seconds(result.preparation_s.median),
        )
    busy = any(result.dense_s.is_wide or result.pruned_s.is_wide for _, result in results)
    return data, [table, *([show.BUSY] if busy else [])]


def _headline(data: dict[str, Any]) -> str:
    system = data["system"]
    where = (
        ", ".join(system["accelerators"])
        if data["device"] != "cpu"
        else f"{system['cpu']}, {system['threads']} threads"
    )
    size = f"{data['architecture']}, {data['parameters'] / 1e6:,.0f} M parameters, " if "parameters" in data else ""
    versions = f"torch {system['torch']}, transformers {system['transformers']}"
    return f"{data['model']}: {size}{data['dtype']}; {where}; {versions}"


def _prefill_table(cells: list[Cell]) -> Table:
    table = Table(title="time to the first token", title_justify="left")
    names = ("pruned", "batch", "tokens", "dense", "pruned", "speed-up", "quartiles", "pairs", "ideal", "achieved")
    for name in (*names, "peak dense", "peak pruned"):
        table.add_column(name, justify="right")
    for cell in cells:
        if cell.prefill is None or cell.memory is None:
            continue
        table.add_row(
            *_labels(cell),
            *map(show.seconds, cell.prefill.typical_s),
            show.factor(cell.prefill.speedup.median),
            show.quartiles(cell.prefill.speedup),
            str(cell.pairs),
            show.factor(cell.prefill.ideal_speedup),
            f"{cell.prefill.achieved:.0%}",
            show.megabytes(cell.memory.dense_bytes),
            show.megabytes(cell.memory.pruned_bytes),
        )
    return table


def _decode_table(cells: list[Cell]) -> Table:
    table = Table(title="generation after the first token", title_justify="left")
    names = ("pruned", "batch", "tokens", "dense", "pruned", "speed-up", "quartiles", "pairs", "ideal", "achieved")
    for name in (*names, "preparation", "break-even"):
        table.add_column(name, justify="right")
    for cell in cells:
        decode = cell.decode
        if decode is None:
            continue
        prepared, after = decode.preparation_steps, decode.break_even_tokens
        table.add_row(
            *_labels(cell),
            *map(show.rate, decode.typical_tokens_per_s),
            show.factor(decode.speedup.median),
            show.quartiles(decode.speedup),
            str(cell.pairs),
            show.factor(decode.ideal_speedup),
            f"{decode.achieved:.0%}",
            "-" if prepared is None else f"{prepared:.2f} steps",
            "never" if after is None else f"{after:.0f} tokens",
        )
    return table


def _labels(cell: Cell) -> tuple[str, str, str]:
    parts = []
    if cell.ratio is not None:
        parts.append(f"layers {cell.ratio:.3g}")
    elif cell.skipped_layers:
        parts.append(f"{cell.skipped_layers} layers, fitted")
    if cell.channels is not None:
        parts.append(f"channels, {cell.ffn_bytes:.0%} of FFN bytes ({', '.join(cell.backends)})")
    return "; ".join(parts), str(cell.batch), f"{cell.prompt_length:,}"


def _csv(cells: list[dict[str, Any]]) -> str:
    """One line a cell, with the nested results as dotted columns."""
    rows = [_flat(cell) for cell in cells]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    file = io.StringIO(newline="")
    writer = csv.DictWriter(file, columns)
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def _flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in data.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif value is not None:
            flat[prefix + name] = value
    return flat
