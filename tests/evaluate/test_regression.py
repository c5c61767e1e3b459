"""Two benchmark files side by side."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

import stageprune as sp
from stageprune.evaluate.regression import compare_files

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"


@pytest.fixture
def data() -> Any:
    return json.loads((RESULTS / "bench.json").read_text())


def written(path: Path, data: Any) -> Path:
    path.write_text(json.dumps(data))
    return path


def scaled(spread: dict[str, float], by: float) -> None:
    for name in ("median", "lower", "upper"):
        spread[name] *= by


def test_a_file_is_like_itself(data: Any, tmp_path: Path) -> None:
    file = written(tmp_path / "a.json", data)
    found = compare_files(file, file, 0.05)
    assert len(found.changes) == 2 * len(data["cells"])
    assert {change.verdict for change in found.changes} == {"same"}
    assert {change.factor for change in found.changes} == {1.0}
    assert found.same_system


def test_what_got_slower_is_found_and_named(data: Any, tmp_path: Path) -> None:
    later = copy.deepcopy(data)
    scaled(later["cells"][2]["prefill"]["pruned_s"], 1.5)
    scaled(later["cells"][2]["prefill"]["speedup"], 1 / 1.5)
    scaled(later["cells"][1]["prefill"]["pruned_s"], 1 / 1.5)
    later["system"]["torch"] = "9"
    found = compare_files(written(tmp_path / "a.json", data), written(tmp_path / "b.json", later), 0.05)
    assert [(change.measure, round(change.factor, 3)) for change in found.worse] == [
        ("first token", 0.667),
        ("speed-up of the first token", 0.667),
    ]
    assert "512 tokens" in found.worse[0].cell
    assert [change.measure for change in found.changes if change.verdict == "better"] == ["first token"]
    assert not found.same_system


def test_noise_is_no_regression(data: Any, tmp_path: Path) -> None:
    """A worse median whose middle half touches the other's; and one apart, but within the threshold."""
    later = copy.deepcopy(data)
    spread = later["cells"][0]["prefill"]["pruned_s"]
    spread["median"] *= 1.2
    spread["upper"] *= 1.3
    scaled(later["cells"][3]["prefill"]["pruned_s"], 1.2)
    files = written(tmp_path / "a.json", data), written(tmp_path / "b.json", later)
    assert not compare_files(*files, 0.3).worse
    assert [change.cell for change in compare_files(*files, 0.05).worse] == [
        change.cell for change in compare_files(*files, 0.05).changes if "2,048" in change.cell
    ][:1]


@pytest.mark.parametrize("name", ["channels-decode.json", "channels-ffn.json"])
def test_generation_and_single_ffns(name: str, tmp_path: Path) -> None:
    data = json.loads((RESULTS / name).read_text())
    later = copy.deepcopy(data)
    for cell in later["cells"]:
        scaled(cell["decode"]["pruned_tokens_per_s"] if cell.get("decode") else cell["pruned_s"], 2)
    found = compare_files(RESULTS / name, written(tmp_path / "b.json", later), 0.05)
    verdicts = {change.verdict for change in found.changes if not change.measure.startswith("speed-up")}
    assert verdicts == {"better" if "decode" in name else "worse"}


def test_cells_of_one_file_alone(data: Any, tmp_path: Path) -> None:
    later = copy.deepcopy(data)
    later["cells"] = later["cells"][1:]
    later["cells"][-1]["prompt_length"] = 4096
    found = compare_files(written(tmp_path / "a.json", data), written(tmp_path / "b.json", later), 0.05)
    assert len(found.only_old) == 2
    assert "4,096 tokens" in found.only_new[0]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "no file of stageprune bench"),
        ("[]", "no file of stageprune bench"),
        ('{"cells": [1]}', "no list of objects"),
        ('{"cells": []}', "nothing in common"),
        (None, "cannot read"),
    ],
    ids=["truncated", "list", "numbers", "empty", "missing"],
)
def test_files_that_are_none(data: Any, tmp_path: Path, content: str | None, says: str) -> None:
    other = tmp_path / "b.json"
    if content is not None:
        other.write_text(content)
    with pytest.raises(sp.ResultFileError, match=says):
        compare_files(written(tmp_path / "a.json", data), other, 0.05)
