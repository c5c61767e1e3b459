"""From result files to a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stageprune.evaluate.report import pareto, plan
from stageprune.evaluate.report.content import Part
from stageprune.evaluate.report.document import Block, Code, Document, Paragraph, Section, Table
from stageprune.evaluate.report.figures import Drawing
from stageprune.evaluate.report.sources import is_plan, read_json, read_part

_PACKAGES = ("stageprune", "torch", "transformers")


def report(paths: Sequence[Path], drawing: Drawing, title: str = "stageprune: quality and speed") -> Document:
    """One document of all that the files hold, in their order.

    Args:
        paths: result files, one or more.
        drawing: `draw_figure`, or `no_figure` for a format without figures.
        title: of the document.

    Raises:
        ResultFileError: names the file that cannot be read, is damaged, or of an unknown kind.
        SettingError: if figures are wanted and matplotlib is missing.
    """
    parts = [read_part(path, drawing) for path in paths]
    speeds = [speed for part in parts for speed in part.speeds]
    sections = pareto.sections([point for part in parts for point in part.points], drawing)
    for path, part in zip(paths, parts, strict=True):
        if is_plan(read_json(path)):
            sections.append(plan.sweep(path, speeds))
        sections += part.sections
    models = dict.fromkeys(part.made.model.rpartition(", ")[0] or part.made.model for part in parts if part.made.model)
    summary = f"{', '.join(models)}. From {len(parts)} result file{'s' * (len(parts) != 1)}."
    return Document(title, summary, [*sections, _provenance(parts)])


def _provenance(parts: Sequence[Part]) -> Section:
    """The commands to run again, and what they ran on."""
    commands = [f"{part.made.command}  # {part.name}" for part in parts if part.made.command is not None]
    silent = [part.name for part in parts if part.made.command is None]
    blocks: list[Block] = []
    if commands:
        blocks += [Paragraph("The commands that wrote these files:"), Code(commands)]
    if silent:
        blocks.append(Paragraph(f"Written before files recorded their command: {', '.join(silent)}."))
    rows = []
    for part in parts:
        system = part.made.system
        where = ", ".join(map(str, system.get("accelerators") or ())) or str(system.get("cpu", "–"))
        threads = f"{system['threads']} threads" if "threads" in system else "–"
        versions = ", ".join(f"{name} {system[name]}" for name in _PACKAGES if name in system)
        rows.append([part.name, part.made.model or "–", where, threads, versions or "–"])
    columns = ["file", "model", "hardware", "threads", "versions"]
    return Section("How it was measured", [*blocks, Table(columns, rows, text_columns=5)])
