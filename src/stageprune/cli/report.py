"""`stageprune report`: tables and figures of result files, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from stageprune.cli.common import UsageProblem, check_outputs, console, note
from stageprune.files import write_file


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Result files: of bench --json, analyze --output, plan --output, eval --output and compare --json.",
            metavar="FILE...",
        ),
    ],
    output_file: Annotated[Path, typer.Option("--output", "-o", help="The report.", metavar="FILE.html|md")] = Path(
        "report.html"
    ),
    form: Annotated[
        Literal["html", "md"] | None,
        typer.Option("--format", help="Default: what the name of --output ends in.", show_default=False),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Of the report.")] = "stageprune: quality and speed",
) -> None:
    """Put result files together: quality against speed, the papers' tables, importance, and the commands to repeat it.

    HTML is one file that needs nothing else; Markdown holds the same tables without the figures.
    """
    form = form or _by_suffix(output_file)
    check_outputs({"--output": output_file})
    if any(path.resolve() == output_file.resolve() for path in files):
        raise UsageProblem(f"--output would overwrite the result file {str(output_file)!r}")
    repeated = next((path for index, path in enumerate(files) if path in files[:index]), None)
    if repeated is not None:
        raise UsageProblem(f"{str(repeated)!r} is given twice")

    from stageprune.evaluate.report import html, markdown
    from stageprune.evaluate.report.build import report as build
    from stageprune.evaluate.report.figures import check_plots, draw_figure, no_figure

    if form == "html":
        check_plots()
    with console.status("drawing"):
        document = build(files, draw_figure if form == "html" else no_figure, title)
    write_file(output_file, (html if form == "html" else markdown).render(document))
    note(f"written: {output_file}")


def _by_suffix(path: Path) -> Literal["html", "md"]:
    match path.suffix.lower():
        case ".html" | ".htm":
            return "html"
        case ".md" | ".markdown":
            return "md"
    raise UsageProblem(f"{str(path)!r} ends neither in .html nor in .md: say which with --format")
