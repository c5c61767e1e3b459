"""The report as a real browser shows it: on a phone, on a desk, in the dark, on paper."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import browser
import report_files as results
from stageprune.evaluate.report import html
from stageprune.evaluate.report.build import report
from stageprune.evaluate.report.figures import draw_figure

pytestmark = pytest.mark.skipif(browser.CHROMIUM is None, reason="no Chromium is installed; see make test-browser")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    makers = (results.plan, results.channels, results.importance, results.compare)
    long = "a-name-without-any-place-to-break-" * 6
    paths = [results.bench(folder, model=long), *(make(folder) for make in makers)]
    page = folder / "report.html"
    page.write_text(html.render(report(paths, draw_figure)), encoding="utf-8")
    return page


def pixels(picture: Path) -> Any:
    from matplotlib.image import imread

    return imread(picture)[..., :3]


@pytest.mark.parametrize("width", [375, 1280])
def test_the_page_fits_the_screen(page: Path, tmp_path: Path, width: int) -> None:
    seen = browser.look(page, tmp_path, width=width, height=2000)
    assert seen["client"] == width
    assert seen["scroll"] <= seen["client"], "the page itself does not scroll sideways"
    for box in (*seen["figures"], *seen["tables"]):
        assert box["left"] >= 0
        assert box["right"] <= width
    assert len(seen["figures"]) == 5
    assert all(box["width"] > 0.8 * min(width, 600) and box["height"] > 150 for box in seen["figures"])
    assert len(seen["tables"]) >= 8
    assert {box["overflow"] for box in seen["tables"]} == {"auto"}, "wide tables scroll by themselves"
    assert seen["smallest"] >= 8, "text of figures can be read"
    assert seen["resources"] == []
    assert seen["active"] == 0
    assert "Sweep of the ratio" in seen["texts"]
    picture = pixels(tmp_path / "page.png")
    assert picture.shape[0] == 2000
    shown = picture[:, :width]
    assert shown.std() > 0.05, "blank"
    assert (shown.reshape(-1, 3).min(1) < 0.5).mean() > 0.01, "text and lines"
    assert (abs(shown.max(2) - shown.min(2)) > 0.3).any(), "coloured marks"


def test_dark_pages_are_dark(page: Path, tmp_path: Path) -> None:
    light, dark = (
        browser.look(page, tmp_path, width=800, height=900, dark=dark, name=f"dark-{dark}") for dark in (False, True)
    )
    assert light["background"] == "rgb(255, 255, 255)"
    assert dark["background"] != light["background"]
    assert dark["color"] != light["color"]
    means = [float(pixels(tmp_path / f"dark-{name}.png").mean()) for name in (False, True)]
    assert means[0] > 0.8
    assert means[1] < 0.3


def test_it_prints(page: Path, tmp_path: Path) -> None:
    pdf = browser.print_to_pdf(page, tmp_path)
    assert pdf.startswith(b"%PDF")
    assert len(pdf) > 20_000
