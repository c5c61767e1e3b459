"""The numbers in the documents are those of the committed result files."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

from tables import documents  # noqa: E402


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "docs/ablation.md",
        "docs/calibrate.md",
        "docs/channels.md",
        "docs/importance.md",
        "docs/sweep.md",
        "docs/trained.md",
        "docs/results.md",
    ],
)
def test_tables_match_the_result_files(path: str) -> None:
    content = {str(document.relative_to(ROOT)): text for document, text in documents().items()}[path]
    assert (ROOT / path).read_text() == content, "run: python benchmarks/tables.py"


def test_links_lead_somewhere() -> None:
    for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            assert target.startswith("https://") or (document.parent / target).exists(), (document.name, target)


def test_the_ablations_come_out_in_the_papers_order() -> None:
    """Table 3 in kind: deep beats interleaved beats shallow, and each part that is taken out hurts."""
    import json

    rows = json.loads((ROOT / "docs" / "results" / "ablation.json").read_text())["variants"]
    kl = {name: row["kl"] for name, row in rows.items()}
    method = kl["last third (the method)"]
    assert method * 3 < kl["every third layer"] < kl["first third"] / 3
    assert method * 2 < kl["last third, no K/V projection"]
    assert method * 2 < kl["last third, no boundary rule"]
