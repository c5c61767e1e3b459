"""`stageprune bench-compare`: has anything become slower?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from stageprune.cli import options, parse, show
from stageprune.cli.common import note, output


def bench_compare(
    old: Annotated[Path, typer.Argument(help="A file of bench --json.", metavar="OLD")],
    new: Annotated[Path, typer.Argument(help="Another, of a later run.", metavar="NEW")],
    threshold: Annotated[
        Any,
        typer.Option("--threshold", parser=parse.fraction, metavar="T", help="Share by which a median may be worse."),
    ] = "0.05",
    as_json: options.Json = False,
) -> None:
    """Compare two result files of bench, cell by cell.

    Exit code 1 if a median is worse by more than the threshold and the middle halves of both runs lie apart.
    """
    from stageprune.evaluate.regression import compare_files

    found = compare_files(old, new, threshold)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        table = Table("setting", "measure", "old", "new", "new / old, more is better", "verdict")
        for change in found.changes:
            verdict = change.verdict if change.apart else f"{change.verdict} (middle halves overlap)"
            numbers = (f"{change.old:.4g}", f"{change.new:.4g}", show.factor(change.factor))
            table.add_row(change.cell, change.measure, *numbers, verdict)
        output.print(table)
        for where, cells in (("OLD", found.only_old), ("NEW", found.only_new)):
            if cells:
                note(f"only in {where}: {'; '.join(cells)}")
        if not found.same_system:
            note("the two ran on other hardware or versions: compare the speed-ups, not the times")
    if found.worse:
        raise typer.Exit(1)
