"""`stageprune eval --tasks` and `stageprune lm-eval`."""

from __future__ import annotations

import json
import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: pip install 'stageprune[eval]'")

from killing import MOMENTS_OF_A_WRITE, killed_at
from local_tasks import write_tasks
from stageprune.evaluate.tasks import KIND, VERSION
from stageprune.records import read_record

TASKS = ("--tasks", "local_choice,local_generate")
OPTIONS = (*TASKS, "--threads", "1", "--dtype", "float32", "--channel-ratio", "0.4", "--channel-backend", "masked")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tasks(tmp_path_factory.mktemp("local") / "tasks")


def test_a_table_with_standard_errors(command: Any, tiny: Path, folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    result = command("eval", tiny, *OPTIONS, "--include-path", folder, "--batch-size", "3", "-o", output)
    assert result.code == 0, result.err
    data = read_record(output, KIND, VERSION)
    assert [(one["setting"], one["task"]) for one in data["results"]] == [
        ("dense", "local_choice"),
        ("dense", "local_generate"),
        ("channels 0.4", "local_choice"),
        ("channels 0.4", "local_generate"),
    ]
    accuracy = data["results"][0]["metrics"]["acc"]
    assert f"{accuracy['value']:.4g} ± {accuracy['stderr']:.2g}" in result.out
    for word in ("dense", "channels 0.4", "acc_norm", "exact_match", "local_generate"):
        assert word in result.out
    assert "local_generate, channels 0.4 (4 of 4)" in result.err
    assert str(folder) not in output.read_text()


def test_json_and_a_limit(command: Any, tiny: Path, folder: Path) -> None:
    result = command("eval", tiny, *OPTIONS, "--include-path", folder, "--limit", "2", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    assert {one["samples"] for one in data["results"]} == {2}
    assert data["settings"]["limit"] == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")
def test_killed_at_any_moment(command: Any, tiny: Path, folder: Path, tmp_path: Path) -> None:
    arguments = ("eval", tiny, *OPTIONS, "--include-path", folder, "--limit", "2", "--output")
    whole, output = tmp_path / "whole.json", tmp_path / "o.json"
    assert command(*arguments, whole).code == 0
    for moment in count():
        output.unlink(missing_ok=True)
        if not killed_at(moment, (*arguments, output)):
            break
        written = moment // MOMENTS_OF_A_WRITE + (moment % MOMENTS_OF_A_WRITE == 2)
        result = command(*arguments, output)
        assert result.code == 0, (moment, result.err)
        assert (f"going on after {min(written, 4)} of 4 tasks" in result.err) == (written > 0)
        assert output.read_bytes() == whole.read_bytes()
    assert moment == (4 + 1) * MOMENTS_OF_A_WRITE + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["o.json", "whole.json"]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--tasks", "nonsense"), 1, "knows no task 'nonsense'"),
        (("--tasks", "a,,b"), 2, "is no list of names"),
        (("--tasks", "a,a"), 2, "names a value twice"),
        ((*TASKS, "--lengths", "30"), 2, "--lengths cannot apply with --tasks"),
        ((*TASKS, "--prompts", "3"), 2, "--prompts cannot apply with --tasks"),
        ((*TASKS, "--no-cache"), 2, "--cache cannot apply with --tasks"),
        (("--limit", "3"), 2, "--limit is for --tasks only"),
        (("--run-code",), 2, "--run-code is for --tasks only"),
        ((*TASKS, "--batch-size", "0"), 2, "'0' is no whole number"),
    ],
    ids=["unknown", "list", "twice", "lengths", "prompts", "cache", "limit", "code", "batch"],
)
def test_bad_options(command: Any, tiny: Path, options: tuple[str, ...], code: int, message: str) -> None:
    result = command("eval", tiny, *options)
    assert (result.code, result.out) == (code, "")
    assert message in result.err


def test_the_harnesss_own_command_line(command: Any, tiny: Path, folder: Path, tmp_path: Path) -> None:
    arguments = ("--tasks", "local_choice", "--include_path", folder, "--limit", "3", "--device", "cpu")
    model = ("--model", "stageprune", "--model_args", f"pretrained={tiny},channel_ratio=0.4,dtype=float32")
    result = command("lm-eval", *model, *arguments, "--output_path", tmp_path / "out")
    assert result.code == 0, result.err
    assert "acc_norm" in result.out
    (file,) = (tmp_path / "out").rglob("results*.json")
    ours = command(
        "eval", tiny, *OPTIONS[2:], "--tasks", "local_choice", "--include-path", folder, "--limit", "3", "--json"
    )
    expected = json.loads(ours.out)["results"][1]["metrics"]["acc_norm"]["value"]
    assert json.loads(file.read_text())["results"]["local_choice"]["acc_norm,none"] == expected


def test_its_exit_code(command: Any) -> None:
    assert command("lm-eval", "run", "--nonsense").code == 2
    assert command("lm-eval", "--help").code == 0
