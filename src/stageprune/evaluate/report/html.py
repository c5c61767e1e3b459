"""A report as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from html import escape
from importlib.resources import files

from stageprune.evaluate.report.document import Block, Code, Document, Figure, Paragraph, Table


def render(document: Document) -> str:
    """The text of the file."""
    style = files(__package__).joinpath("style.css").read_text(encoding="utf-8")
    parts = [
        "<!doctype html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta name="color-scheme" content="light dark">',
        # Even what slipped through the escaping could neither run nor load anything.
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(document.title)}</title>",
        f"<style>\n{style}</style>",
        "</head>",
        "<body>",
        "<header>",
        f"<h1>{escape(document.title)}</h1>",
        f"<p>{escape(document.summary)}</p>",
        "</header>",
        "<nav><ul>",
        *(f'<li><a href="#s{index}">{escape(part.title)}</a></li>' for index, part in enumerate(document.sections)),
        "</ul></nav>",
        "<main>",
    ]
    for index, section in enumerate(document.sections):
        parts += [f'<section id="s{index}">', f"<h2>{escape(section.title)}</h2>", *map(_block, section.blocks)]
        parts.append("</section>")
    return "\n".join([*parts, "</main>", "</body>", "</html>"]) + "\n"


def _block(block: Block) -> str:
    match block:
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Code(lines):
            return f"<pre><code>{escape(chr(10).join(lines))}</code></pre>"
        case Table():
            return _table(block)
        case Figure(svg, caption):
            text = escape(caption)
            return f'<figure role="img" aria-label="{text}">\n{svg}\n<figcaption>{text}</figcaption>\n</figure>'


def _table(table: Table) -> str:
    def cell(tag: str, index: int, text: str) -> str:
        kind = ' class="word"' if index < table.text_columns else ""
        return f"<{tag}{kind}>{escape(text)}</{tag}>"

    # The caption is outside of what scrolls, so that it can be read on a phone without scrolling.
    # tabindex: so that a table that is wider than the screen can be scrolled by keyboard, too.
    label = f' aria-label="{escape(table.caption)}"' if table.caption else ""
    parts = [f'<p class="caption">{escape(table.caption)}</p>'] if table.caption else []
    parts += ['<div class="scroll" tabindex="0">', f"<table{label}>"]
    heads = "".join(cell("th", index, text) for index, text in enumerate(table.columns))
    parts += ["<thead>", f"<tr>{heads}</tr>", "</thead>", "<tbody>"]
    for index, row in enumerate(table.rows):
        mark = ' class="marked"' if index in table.marked else ""
        parts.append(f"<tr{mark}>{''.join(cell('td', place, text) for place, text in enumerate(row))}</tr>")
    return "\n".join([*parts, "</tbody>", "</table>", "</div>"])
