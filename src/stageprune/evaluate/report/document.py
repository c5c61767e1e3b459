"""What a report consists of, before it is HTML or Markdown. All text is plain text; who renders it escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True)
class Paragraph:
    """Some sentences."""

    text: str


@dataclass(frozen=True)
class Code:
    """Lines to be copied, such as commands."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Table:
    """Rows of cells.

    Attributes:
        columns: their headings.
        rows: a cell for each column.
        caption: what it shows, and in which units.
        text_columns: how many columns on the left are words; numbers are aligned on the right.
        marked: indices of rows that stand out, such as the frontier.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    caption: str = ""
    text_columns: int = 1
    marked: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Figure:
    """A picture.

    Attributes:
        svg: as `figures.svg_of` gives it.
        caption: what it shows; also for those who do not see it.
    """

    svg: str
    caption: str


Block: TypeAlias = Paragraph | Code | Table | Figure


@dataclass(frozen=True)
class Section:
    """A heading and what follows."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """A report.

    Attributes:
        title: of all.
        summary: a line under it.
        sections: in order.
    """

    title: str
    summary: str
    sections: Sequence[Section] = field(default_factory=tuple)
