"""Files of `stageprune bench --json`: the time to the first token (arXiv 2602.03295, Table 2), and generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from stageprune.evaluate.report import show
from stageprune.evaluate.report.content import Interval, Part, PromptSpeed, made
from stageprune.evaluate.report.document import Block, Section, Table
from stageprune.evaluate.report.settings import words


def part(name: str, data: Any) -> Part:
    """What the file `name` contributes.

    Raises:
        KeyError, TypeError, ValueError: if something is missing or wrong.
    """
    cells = data["cells"]
    how = made(data)
    if all("hidden_size" in cell for cell in cells):
        return Part(name, how, [Section(f"Single FFNs ({name})", [_ffns(cells, how.model)])])
    sections = []
    first = [cell for cell in cells if cell["prefill"] is not None]
    later = [cell for cell in cells if cell["decode"] is not None]
    if first:
        blocks: list[Block] = [_by_length(first, how.model), _first_tokens(first)]
        sections.append(Section(f"Time to the first token ({name})", blocks))
    if later:
        sections.append(Section(f"Generation after the first token ({name})", [_generation(later, how.model)]))
    return Part(name, how, sections, speeds=[_speed(cell, str(data["model"])) for cell in first if _plain(cell)])


def _plain(cell: Any) -> bool:
    """Whether the prompt skips the last layers and nothing else is pruned."""
    methods = cell.get("methods")
    return methods is None or (len(methods) == 1 and methods[0].get("layers") == "last")


def _speed(cell: Any, model: str) -> PromptSpeed:
    speedup = Interval.of_spread(cell["prefill"]["speedup"])
    return PromptSpeed(model, int(cell["prompt_length"]), int(cell["batch"]), int(cell["skipped_layers"]), speedup)


def _name(cell: Any) -> str:
    methods = cell.get("methods")
    name = f"{cell['ratio']:.3g} of layers, last" if methods is None else words(methods)
    backends = ", ".join(map(str, cell.get("backends") or ()))
    return f"{name} ({backends})" if backends else name


def _by_length(cells: Sequence[Any], model: str) -> Table:
    """Speed-ups only, a row for each setting and a column for each length, as in Table 2."""
    lengths = sorted({int(cell["prompt_length"]) for cell in cells})
    rows: dict[tuple[str, int], dict[int, str]] = {}
    for cell in cells:
        speedup = Interval.of_spread(cell["prefill"]["speedup"]).value
        rows.setdefault((_name(cell), int(cell["batch"])), {})[int(cell["prompt_length"])] = show.factor(speedup)
    columns = ["setting", "batch", *(f"{length:,} tokens" for length in lengths)]
    body = [[name, str(batch), *(row.get(length, "–") for length in lengths)] for (name, batch), row in rows.items()]
    return Table(columns, body, f"{model}: speed-up of the first token by length of the prompt (as Table 2).")


def _first_tokens(cells: Sequence[Any]) -> Table:
    columns = ["setting", "batch", "tokens", "dense", "pruned", "speed-up", "middle half", "ideal", "peak memory"]
    rows = []
    for cell in cells:
        part, memory = cell["prefill"], cell.get("memory") or {}
        speedup = Interval.of_spread(part["speedup"])
        peaks = [show.megabytes(memory.get(name)) for name in ("dense_bytes", "pruned_bytes")]
        rows.append(
            [
                _name(cell),
                str(cell["batch"]),
                f"{cell['prompt_length']:,}",
                show.time(part["dense_s"]["median"]),
                show.time(part["pruned_s"]["median"]),
                show.factor(speedup.value),
                show.middle_half(speedup),
                show.factor(part["ideal_speedup"]),
                " / ".join(peaks),
            ]
        )
    caption = (
        "Medians over alternating dense and pruned turns; the speed-up is taken between neighbours. Ideal: by "
        "floating-point operations. Peak memory on top of the weights, dense / pruned."
    )
    return Table(columns, rows, caption)


def _generation(cells: Sequence[Any], model: str) -> Table:
    columns = ["setting", "batch", "prompt", "dense", "pruned", "speed-up", "middle half", "ideal", "break-even"]
    rows = []
    for cell in cells:
        part = cell["decode"]
        speedup, after = Interval.of_spread(part["speedup"]), part["break_even_tokens"]
        rows.append(
            [
                _name(cell),
                str(cell["batch"]),
                f"{cell['prompt_length']:,}",
                f"{part['dense_tokens_per_s']['median']:.3g} tokens/s",
                f"{part['pruned_tokens_per_s']['median']:.3g} tokens/s",
                show.factor(speedup.value),
                show.middle_half(speedup),
                show.factor(part["ideal_speedup"]),
                "never" if after is None else f"{after:.0f} tokens",
            ]
        )
    caption = f"{model}: tokens after the first one. Ideal: by bytes of weights and cache that are read."
    return Table(columns, rows, caption)


def _ffns(cells: Sequence[Any], model: str) -> Table:
    columns = ["hidden × intermediate", "setting", "rows", "dense", "pruned", "speed-up", "middle half", "ideal"]
    rows = []
    for cell in cells:
        speedup = Interval.of_spread(cell["speedup"])
        rows.append(
            [
                f"{cell['hidden_size']:,} × {cell['intermediate_size']:,}",
                f"{words([cell['method']])} ({cell['backend']})",
                str(cell["rows"]),
                show.time(cell["dense_s"]["median"]),
                show.time(cell["pruned_s"]["median"]),
                show.factor(speedup.value),
                show.middle_half(speedup),
                show.factor(cell["ideal_speedup"]),
            ]
        )
    return Table(columns, rows, f"{model}: one token through one FFN. Ideal: by bytes.", text_columns=2)
