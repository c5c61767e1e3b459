"""What each command prints and writes, on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_generate_prints_the_answer_as_the_library_gives_it(command, tiny: Path) -> None:
    import torch

    import stageprune as sp

    result = command("generate", "a b c d e f", "--model", tiny, "--ratio", "1/2", "--max-new-tokens", "6", "--json")
    assert result.code == 0
    data = json.loads(result.out)
    loaded = sp.load(str(tiny), dtype="float32")
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "a b c d e f"}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids])
    with sp.prune(loaded.model, sp.PrefillOnlyPruning(0.5)):
        expected = loaded.model.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :]
    assert data["text"] == loaded.tokenizer.decode(expected, skip_special_tokens=True)
    assert data["report"]["skipped_layers"] == [1]


def test_generate_streams_to_a_reader(command, tiny: Path, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("a t a t")
    plain = command("generate", "--file", prompt, "--model", tiny, "--max-new-tokens", "5", "--no-chat")
    assert plain.code == 0
    piped = subprocess.run(
        [
            sys.executable,
            "-m",
            "stageprune",
            "generate",
            "-",
            "--model",
            str(tiny),
            "--max-new-tokens",
            "5",
            "--no-chat",
        ],
        input="a t a t",
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == plain.out


def test_compare_reports_both_sides(command, tiny: Path) -> None:
    arguments = ("compare", "a b c d", "--model", tiny, "--ratio", "1/2", "--max-new-tokens", "4", "--repeats", "1")
    data = json.loads(command(*arguments, "--json").out)
    assert data["report"]["ideal_speedup"] > 1
    assert len(data["dense_tokens"]) == len(data["pruned_tokens"]) == 4
    assert 0 <= data["equal_share"] <= 1
    text = command(*arguments)
    assert text.code == 0
    assert "dense" in text.out
    assert "ideal" in text.out


def test_bench_writes_the_same_numbers_everywhere(command, tiny: Path, tmp_path: Path) -> None:
    arguments = ["bench", "--model", tiny, "--lengths", "8,16", "--ratios", "1/2", "--repeats", "1", "--seconds", "0"]
    result = command(*arguments, "--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv", "--dtype", "float32")
    assert result.code == 0, result.err
    data = json.loads((tmp_path / "b.json").read_text())
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2
    text = json.dumps(data)
    assert "ideal_speedup" in text
    assert str(tmp_path) not in text, "no path of a machine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.csv", "b.json"]


def test_doctor_says_what_can_be_pruned_and_what_not(command, tiny: Path, tmp_path: Path) -> None:
    supported = command("doctor", tiny, "--json")
    assert supported.code == 0
    assert "transformers" in supported.out
    assert json.loads(supported.out)
    assert "can be pruned" in command("doctor", tiny).out
    config = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused = command("doctor", tmp_path)
    assert "cannot" in refused.out or "not" in refused.out


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["bench", "-h"], ["--version"]])
def test_help(command, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.code == 0
    assert result.out


def test_no_command_shows_the_help(command) -> None:
    result = command()
    assert result.code == 2
    assert "generate" in result.out + result.err
