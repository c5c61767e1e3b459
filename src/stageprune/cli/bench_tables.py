"""The tables that `stageprune bench` prints, and its CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.table import Table

from stageprune.cli import show
from stageprune.methods import OnlineChannelPruning

if TYPE_CHECKING:
    from stageprune.evaluate.ffn_speed import FFNSpeed
    from stageprune.evaluate.grid import Cell
    from stageprune.evaluate.peers.run import PeerResult
    from stageprune.evaluate.profile import StageSplits


def headline(data: dict[str, Any]) -> str:
    """What was measured, and on what."""
    system = data["system"]
    where = (
        ", ".join(system["accelerators"])
        if data["device"] != "cpu"
        else f"{system['cpu']}, {system['threads']} threads"
    )
    size = f"{data['architecture']}, {data['parameters'] / 1e6:,.0f} M parameters, " if "parameters" in data else ""
    versions = f"torch {system['torch']}, transformers {system['transformers']}"
    return f"{data['model']}: {size}{data['dtype']}; {where}; {versions}"


def first_tokens(cells: Sequence[Cell]) -> Table:
    """The time to the first token."""
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


def generation(cells: Sequence[Cell]) -> Table:
    """The tokens after it."""
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


def answers(cells: Sequence[Cell]) -> Table:
    """Whole answers, from the prompt to the last token."""
    table = Table(title="whole answers", title_justify="left")
    names = ("pruned", "batch", "tokens", "new", "dense", "pruned", "speed-up", "quartiles", "pairs", "ideal")
    for name in (*names, "achieved", "dense", "pruned"):
        table.add_column(name, justify="right")
    for cell in cells:
        answer = cell.answer
        if answer is None:
            continue
        table.add_row(
            *_labels(cell),
            str(answer.new_tokens),
            show.seconds(answer.dense_s.median),
            show.seconds(answer.pruned_s.median),
            show.factor(answer.speedup.median),
            show.quartiles(answer.speedup),
            str(cell.pairs),
            show.factor(answer.ideal_speedup),
            f"{answer.achieved:.0%}",
            *map(show.rate, answer.tokens_per_s),
        )
    return table


def profiles(cells: Sequence[Cell]) -> Table:
    """Where the time goes, in shares of it."""
    table = Table(title="parts of the time", title_justify="left")
    for name in ("pruned", "batch", "tokens", "model", "time of", "total", "attention", "FFNs", "rest", "timing adds"):
        table.add_column(name, justify="right")
    for cell in cells:
        if cell.profile is None:
            continue
        for model, splits in (("dense", cell.profile.dense), ("pruned", cell.profile.pruned)):
            for row in _parts(splits):
                table.add_row(*_labels(cell), model, *row, f"{splits.overhead:+.0%}")
    return table


def _parts(splits: StageSplits) -> list[tuple[str, ...]]:
    rows = []
    for name, split in (("first token", splits.first_token), ("later token", splits.later_token)):
        if split is not None:
            shares = (part / split.total for part in (split.attention, split.ffn, split.other))
            rows.append((name, show.seconds(split.total), *(f"{share:.0%}" for share in shares)))
    return rows


def peers(results: Sequence[PeerResult]) -> list[Table | str]:
    """The dense model in others' hands, and what is missing."""
    lines: list[Table | str] = []
    table = Table(title="peers, in alternation with the dense model in plain transformers", title_justify="left")
    names = ("peer", "precision", "batch", "tokens", "new", "first token", "speed-up", "quartiles")
    for name in (*names, "whole answer", "speed-up", "quartiles", "tokens/s"):
        table.add_column(name, justify="right")
    for result in results:
        if result.missing is not None:
            lines.append(f"{result.peer} was not measured: {result.missing}")
        for speed in result.cells:
            table.add_row(
                speed.peer,
                speed.precision,
                str(speed.batch),
                f"{speed.prompt_length:,}",
                str(speed.new_tokens),
                show.seconds(speed.first_s.median),
                show.factor(speed.first_speedup.median),
                show.quartiles(speed.first_speedup),
                show.seconds(speed.total_s.median),
                show.factor(speed.total_speedup.median),
                show.quartiles(speed.total_speedup),
                show.rate(speed.tokens_per_s),
            )
    return [*([table] if table.row_count else []), *lines]


def ffns(results: Sequence[tuple[OnlineChannelPruning, FFNSpeed]]) -> Table:
    """Single FFNs."""
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


def as_csv(cells: Sequence[dict[str, Any]]) -> str:
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
