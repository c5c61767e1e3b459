"""`stageprune bench`: speed over prompt lengths, batch sizes and ratios."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.table import Table

from stageprune.cli import options, parse, prompts, show
from stageprune.cli.common import UsageProblem, console, load_model, output, progress, set_threads, shown_name
from stageprune.files import check_writable, write_file

if TYPE_CHECKING:
    from stageprune.evaluate.grid import Cell

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
        typer.Option("--ratios", "-r", parser=parse.ratios, metavar="R,R,...", help="Shares of the layers to skip."),
    ] = "1/3",
    layers: Annotated[Literal["last", "first", "interleaved"], typer.Option("--layers", help="Which layers.")] = "last",
    what: Annotated[
        Literal["prefill", "decode", "all"],
        typer.Option("--what", help="The time to the first token and its memory, the tokens after it, or both."),
    ] = "prefill",
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
    paths = [path for path in (json_path, csv_file) if path is not None]
    for path in paths:
        check_writable(path)
    if len(paths) == 2 and paths[0].absolute() == paths[1].absolute():
        raise UsageProblem(f"--json and --csv name the same file {str(csv_file)!r}")
    if max(batch) * max(lengths) > MOST_TOKENS:
        raise UsageProblem(
            f"{max(batch)} prompts of {max(lengths)} tokens are more than {MOST_TOKENS} tokens at a time"
        )
    set_threads(threads)
    loaded = load_model(model, dtype, device)

    from stageprune.evaluate.grid import Grid, run_grid
    from stageprune.evaluate.system import system_info

    new_tokens = 1 if what == "prefill" else DECODE_TOKENS
    for length in lengths:
        prompts.check_fits(loaded.model, length, new_tokens)
    grid = Grid(lengths, batch, ratios, layers, what != "decode", new_tokens, repeats, seconds)
    cells = []
    with progress("measuring", 2 * repeats * grid.cells) as step:
        for cell in run_grid(loaded.model, loaded.tokenizer, grid, step):
            cells.append(cell)
    data = {
        "model": shown_name(model),
        "architecture": type(loaded.model).__name__,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "device": str(loaded.model.device),
        "attention": loaded.model.config._attn_implementation,
        "layers": layers,
        "system": system_info(),
        "cells": [cell.to_dict() for cell in cells],
    }
    if csv_file is not None:
        write_file(csv_file, _csv(cells))
    if json_path is not None:
        write_file(json_path, json.dumps(data, indent=2) + "\n")
    if json_file == "-":
        typer.echo(json.dumps(data, indent=2))
        return
    _show(data, cells, what)
    for path in paths:
        console.print(f"written: {path}", style="dim", markup=False, soft_wrap=True)


def _show(data: dict[str, Any], cells: list[Cell], what: str) -> None:
    system = data["system"]
    where = (
        ", ".join(system["accelerators"])
        if data["device"] != "cpu"
        else f"{system['cpu']}, {system['threads']} threads"
    )
    output.print(
        f"{data['model']}: {data['architecture']}, {data['parameters'] / 1e6:,.0f} M parameters, {data['dtype']}; "
        f"{where}; torch {system['torch']}, transformers {system['transformers']}",
        markup=False,
        soft_wrap=True,
    )
    if what != "decode":
        output.print(_prefill_table(cells))
        if any(cell.prefill and cell.prefill.dense_s.is_wide for cell in cells):
            output.print(show.BUSY, soft_wrap=True)
    if what != "prefill":
        output.print(_decode_table(cells))


def _prefill_table(cells: list[Cell]) -> Table:
    table = Table(title="time to the first token", title_justify="left")
    names = ("ratio", "batch", "tokens", "dense", "pruned", "speed-up", "quartiles", "pairs", "ideal", "achieved")
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
    for name in ("ratio", "batch", "tokens", "dense", "pruned", "speed-up", "quartiles", "pairs"):
        table.add_column(name, justify="right")
    for cell in cells:
        if cell.decode is None:
            continue
        table.add_row(
            *_labels(cell),
            *map(show.rate, cell.decode.typical_tokens_per_s),
            show.factor(cell.decode.speedup.median),
            show.quartiles(cell.decode.speedup),
            str(cell.pairs),
        )
    return table


def _labels(cell: Cell) -> tuple[str, str, str]:
    return f"{cell.ratio:.3g}", str(cell.batch), f"{cell.prompt_length:,}"


def _csv(cells: list[Cell]) -> str:
    """One line a cell, with the nested results as dotted columns."""
    rows = [_flat(cell.to_dict()) for cell in cells]
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
