"""Headless Chromium, driven by its command line."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

_PAGE = """<!doctype html><style>body {{ margin: 0 }} iframe {{ border: 0; display: block }}</style>
<iframe src="{page}" width="{width}" height="{height}"></iframe><pre id="seen"></pre>
<script>
onload = () => {{
  const page = document.querySelector("iframe").contentDocument, root = page.documentElement;
  const box = (element) => {{
    const {{left, right, width, height}} = element.getBoundingClientRect();
    return {{left, right, width, height}};
  }};
  document.getElementById("seen").textContent = JSON.stringify({{
    scroll: root.scrollWidth, client: root.clientWidth, height: root.scrollHeight,
    color: getComputedStyle(page.body).color, background: getComputedStyle(page.body).backgroundColor,
    figures: [...page.querySelectorAll("figure svg")].map(box),
    tables: [...page.querySelectorAll(".scroll")].map((element) => ({{...box(element),
      overflow: getComputedStyle(element).overflowX}})),
    smallest: Math.min(...[...page.querySelectorAll("svg text")].map((text) =>
      parseFloat(getComputedStyle(text).fontSize) * text.ownerSVGElement.getScreenCTM().a)),
    texts: page.body.innerText,
    resources: page.defaultView.performance.getEntriesByType("resource").map((entry) => entry.name),
    active: page.querySelectorAll("script, link, img, iframe, object, embed").length,
  }});
}};
</script>"""


def look(
    page: Path, folder: Path, *, width: int, height: int, dark: bool = False, name: str = "page"
) -> dict[str, Any]:
    """What a browser makes of a page whose window is `width` wide; its picture is `folder/name.png`.

    The page lies in a frame of that width, as a window cannot be as narrow as a phone.
    """
    wrapper = folder / f"{name}.html"
    wrapper.write_text(_PAGE.format(page=page.as_uri(), width=width, height=height), encoding="utf-8")
    picture = folder / f"{name}.png"
    seen = _run(wrapper, folder, [f"--window-size={max(width, 500)},{height}", "--dump-dom"], dark)
    _run(wrapper, folder, [f"--window-size={max(width, 500)},{height}", f"--screenshot={picture}"], dark)
    found = re.search(r'<pre id="seen">(.*?)</pre>', seen, re.DOTALL)
    assert found, seen[:2000]
    data: dict[str, Any] = json.loads(unescape(found[1]))
    return data


def print_to_pdf(page: Path, folder: Path) -> bytes:
    """The page as it is printed."""
    pdf = folder / "page.pdf"
    _run(page, folder, [f"--print-to-pdf={pdf}", "--no-pdf-header-footer"], False)
    return pdf.read_bytes()


def _run(page: Path, folder: Path, options: list[str], dark: bool) -> str:
    assert CHROMIUM is not None
    profile = folder / "profile"
    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--disable-dev-shm-usage", "--allow-file-access-from-files", "--virtual-time-budget=2000",
        f"--user-data-dir={profile}", *(["--blink-settings=preferredColorScheme=0"] if dark else []),
        *options, page.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout
