"""Reports of result files: what they say, that it escapes, and that it needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

import report_files as results
from stageprune.evaluate.report import html, markdown
from stageprune.evaluate.report.build import report
from stageprune.evaluate.report.content import Interval, Point
from stageprune.evaluate.report.document import Code, Document, Paragraph, Section, Table
from stageprune.evaluate.report.figures import draw_figure, no_figure
from stageprune.evaluate.report.pareto import frontier


class Page(HTMLParser):
    """Tags with their attributes, ids, and the text, of which that of tables row by row."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.words: list[str] = []
        self.in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.in_cell = True

    def handle_endtag(self, tag: str) -> None:
        self.in_cell = self.in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self.in_cell:
            self.rows[-1][-1] += data


@pytest.fixture
def everything(tmp_path: Path) -> list[Path]:
    makers = (results.plan, results.bench, results.channels, results.importance, results.compare)
    return [make(tmp_path) for make in makers]


def test_tables_are_those_of_the_files(everything: list[Path]) -> None:
    rows = Page(html.render(report(everything, draw_figure))).rows
    assert ["0.5 of layers, last", "1", "1.25×", "1.75×"] in rows, "a column for each length"
    assert ["0.5 of layers, last", "1", "32", "2 s", "1.6 s", "1.25×", "1.15–1.35", "1.90×", "2.0 MB / –"] in rows
    channels = "channels 0.2, partition, γ 0.1 (indexed)"
    assert [channels, "1", "32", "10 tokens/s", "12.5 tokens/s", "1.25×", "1.15–1.35", "1.50×", "never"] in rows
    sweep = ["50 %", "2 of 4", "1.67×", "1.75× (1.65–1.85)", "0.2 ± 0.01", "80.0% ± 2.0%"]
    assert sweep in rows, "with the speed-up that another file measured at the longest prompt"
    assert ["25 %", "1 of 4", "1.25×", "–", "0.05 ± 0.01", "90.0% ± 2.0%"] in rows
    assert ["paper", "80.0%", "1.25×", "0.2 ± 0.1", "85.0% ± 5.0%"] in rows
    assert ["2", "1", "6.5 ± 2.5", "6.50", "1.000", "1.000", "1.000", "1.000"] in rows
    assert ["1", "80.0%", "25.0%"] in rows
    made = next(row for row in rows if row[0] == "bench.json")
    assert made[:4] == ["bench.json", "tiny, float32", "A & B <cpu>", "2 threads"]


def test_an_evaluation_has_rows_with_intervals_and_a_plot_for_each_stage(tmp_path: Path) -> None:
    text = html.render(report([results.evaluation(tmp_path, results.EVIL)], draw_figure))
    page = Page(text)
    shared = ["80.0% [72.0%, 88.0%]", "9", "50.0% [45.0%, 55.0%]"]
    assert ["layers 0.5", "0.2 [0.18, 0.22]", *shared, "1.90×", "1.00×"] in page.rows
    assert [results.EVIL, "0.4 [0.36, 0.44]", *shared, "1.00×", "1.20×"] in page.rows
    assert sum(tag == "svg" for tag, _ in page.tags) == 2
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "img"})
    assert "stageprune eval tiny  # eval.json" in text


def test_the_commands_can_be_copied(everything: list[Path]) -> None:
    document = report(everything, no_figure)
    code = next(block for block in document.sections[-1].blocks if isinstance(block, Code))
    assert code.lines == [
        "stageprune bench --model tiny  # bench.json",
        "python benchmarks/channels.py  # channels.json",
        "stageprune analyze tiny  # importance.json",
    ]


def test_the_best_of_the_plan_is_marked(everything: list[Path]) -> None:
    text = html.render(report(everything[:1], no_figure))
    marked = re.findall(r'<tr class="marked">(.*?)</tr>', text)
    assert len(marked) == 1
    assert '<td class="word">2–3</td>' in marked[0]


def test_nothing_is_loaded_and_nothing_runs(everything: list[Path]) -> None:
    text = html.render(report(everything, draw_figure))
    page = Page(text)
    tags = {tag for tag, _ in page.tags}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "image", "foreignobject"}
    for tag, attributes in page.tags:
        for name, value in attributes.items():
            if name in ("href", "src", "xlink:href", "data", "action", "srcset"):
                assert value is not None
                assert value.startswith("#"), (tag, name, value)
            assert not name.startswith("on"), (tag, name)
    assert "@import" not in text
    assert all(target.startswith("#") for target in re.findall(r"url\(['\"]?([^)]*)", text))
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids)), "pictures do not share ids"
    targets = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    assert {one or other for one, other in targets} <= set(ids)
    assert sum(tag == "svg" for tag, _ in page.tags) == 5
    assert "currentColor" in text
    assert "#010203" not in text


def test_names_are_text_whatever_they_look_like(tmp_path: Path) -> None:
    paths = [
        results.bench(tmp_path, model=results.EVIL),
        results.plan(tmp_path, model=results.EVIL),
        results.importance(tmp_path, model=results.EVIL),
        results.channels(tmp_path, rule=results.EVIL),
    ]
    text = html.render(report(paths, draw_figure, title=results.EVIL))
    page = Page(text)
    assert not [tag for tag, _ in page.tags if tag in ("script", "img")]
    assert results.EVIL in "".join(page.words)
    assert any(row[0] == results.EVIL for row in page.rows if row)
    clean = markdown.render(report(paths, no_figure, title=results.EVIL))
    outside = re.sub(r"(?ms)^```.*?^```", "", clean)
    assert not re.search(r"(?<!\\)[<>]|(?<!\\)\[a\]|(?<!\\)`|http://", outside)
    for line in outside.splitlines():
        if line.startswith("|"):
            assert not re.search(r"(?<!\\)\$", line)


def test_markdown_tables_have_as_many_cells_as_columns(everything: list[Path]) -> None:
    text = markdown.render(report(everything, no_figure))
    tables = re.findall(r"(?m)(?:^\|.*\n)+", text)
    assert len(tables) >= 8
    for table in tables:
        lines = table.splitlines()
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
        assert len(counts) == 1, table
        assert set(lines[1]) <= set("|-:")
    assert "| 50 % | 2 of 4 | 1.67× | 1.75× (1.65–1.85) | 0.2 ± 0.01 | 80.0% ± 2.0% |" in text
    assert "| **0.5** | 2–3 | last | 1.67× |" in text, "the best setting is marked here, too"
    assert "svg" not in text


def test_the_same_files_give_the_same_page(everything: list[Path]) -> None:
    assert html.render(report(everything, draw_figure)) == html.render(report(everything, draw_figure))


def test_a_fence_is_longer_than_what_it_holds() -> None:
    document = Document("t", "", [Section("s", [Code(["a ``` b", "c\n```"]), Paragraph("p"), Table(["a"], [["b"]])])])
    assert "````\na ``` b\nc ```\n````" in markdown.render(document)


def point(speedup: float, kl: float) -> Point:
    return Point("", "", "prompt", Interval.of(speedup), "ideal", Interval.of(kl), None, "")


def test_the_frontier_is_what_no_other_point_beats() -> None:
    points = [point(*values) for values in ((1.0, 0.1), (1.2, 0.1), (1.1, 0.05), (1.5, 0.4), (1.4, 0.5), (1.5, 0.4))]
    assert frontier(points) == [1, 2, 3, 5], "equal points are both on it"


def test_intervals() -> None:
    assert Interval.of_mean([1.0, 3.0]) == Interval(2.0, 1.0, 3.0), "standard error: sqrt(2) / sqrt(2)"
    assert Interval.of_mean([2.0]) == Interval(2.0, 2.0, 2.0)
    for wrong in ("1", None, True, float("nan"), float("inf")):
        with pytest.raises((TypeError, ValueError)):
            Interval.of(wrong)
