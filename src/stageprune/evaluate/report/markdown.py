"""A report as Markdown: all tables and commands, and in place of each figure what it shows."""

from __future__ import annotations

import re

from stageprune.evaluate.report.document import Block, Code, Document, Figure, Paragraph, Table


def render(document: Document) -> str:
    """The text of the file."""
    parts = [f"# {_escaped(document.title)}", _escaped(document.summary)]
    for section in document.sections:
        blocks = [block for block in section.blocks if not isinstance(block, Figure)]
        if blocks:
            parts += [f"## {_escaped(section.title)}", *map(_block, blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return _escaped(text)
        case Code(lines):
            longest = max((len(run) for line in lines for run in re.findall("`+", line)), default=0)
            fence = "`" * max(3, longest + 1)
            return "\n".join([fence, *(" ".join(line.splitlines()) for line in lines), fence])
        case Table():
            return _table(block)
        case Figure():
            raise AssertionError("figures are left out before")


def _table(table: Table) -> str:
    aligned = ["---" if index < table.text_columns else "--:" for index in range(len(table.columns))]
    lines = [_row(table.columns), f"|{'|'.join(aligned)}|"]
    for index, row in enumerate(table.rows):
        cells = list(map(_escaped, row))
        if index in table.marked:
            cells[0] = f"**{cells[0]}**"
        lines.append(f"| {' | '.join(cells)} |")
    if table.caption:
        lines = [_escaped(table.caption), "", *lines]
    return "\n".join(lines)


def _row(cells: object) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"  # type: ignore[call-overload]


def _escaped(text: str) -> str:
    """Text that no renderer takes for markup: in CommonMark a backslash makes every ASCII punctuation literal."""
    return re.sub(r"([\\`*_\[\]<>|#~$&!]|(?<=:)//|(?<=www)\.)", _backslash, _one_line(text))


def _backslash(match: re.Match[str]) -> str:
    # Addresses, too, would become links by themselves.
    return "".join(f"\\{character}" for character in match[0])


def _one_line(text: str) -> str:
    return " ".join(text.split())
