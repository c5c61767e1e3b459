"""`stageprune bench-compare`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parents[2] / "docs" / "results" / "bench.json"


def test_the_exit_code_says_whether_something_got_slower(command: Any, tmp_path: Path) -> None:
    assert command("bench-compare", BENCH, BENCH).code == 0
    data = json.loads(BENCH.read_text())
    for name in ("median", "lower", "upper"):
        data["cells"][0]["prefill"]["pruned_s"][name] *= 2
    later = tmp_path / "later.json"
    later.write_text(json.dumps(data))
    shown = command("bench-compare", BENCH, later)
    assert shown.code == 1
    assert "worse" in shown.out
    assert "0.50x" in shown.out
    assert command("bench-compare", BENCH, later, "--threshold", "0.6").code == 0
    result = command("bench-compare", BENCH, later, "--json")
    assert result.code == 1
    assert json.loads(result.out)["worse"] == 1


def test_a_missing_file_is_one_line(command: Any, tmp_path: Path) -> None:
    shown = command("bench-compare", BENCH, tmp_path / "none.json")
    assert shown.code == 1
    assert shown.err.count("\n") == 1
    assert "cannot read" in shown.err
