"""Wrong command lines: one clear line that names the value, the right exit code, no file touched."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = "a t " * 400

USAGE = [
    (["generate", "x", "--ratio", "2"], "'2'"),
    (["generate", "x", "--ratio", "1"], "'1'"),
    (["generate", "x", "--ratio", "-0.1"], "-0.1"),
    (["generate", "x", "--ratio", "1/0"], "1/0"),
    (["generate", "x", "--ratio", "a third"], "a third"),
    (["generate", "x", "--ratio", "nan"], "nan"),
    (["generate", "x", "--ratio", ""], "''"),
    (["generate", "x", "--layers", "deepest"], "deepest"),
    (["generate", "x", "--layers", "9-3"], "9-3"),
    (["generate", "x", "--layers", "1,1"], "1,1"),
    (["generate", "x", "--layers", "-1"], "-1"),
    (["generate", "x", "--layers", "1.5"], "1.5"),
    (["generate", "x", "--layers", "0-99999999"], "0-99999999"),
    (["generate", "x", "--max-new-tokens", "0"], "0"),
    (["generate", "x", "--max-new-tokens", "-3"], "-3"),
    (["generate", "x", "--max-new-tokens", "many"], "many"),
    (["generate", "x", "--temperature", "-1"], "-1"),
    (["generate", "x", "--temperature", "warm"], "warm"),
    (["generate", "x", "--top-p", "0"], "'0'"),
    (["generate", "x", "--top-p", "0.9"], "temperature"),
    (["generate", "x", "--seed", "3"], "temperature"),
    (["generate", "x", "--dtype", "float13"], "float13"),
    (["generate", "x", "--dense", "--ratio", "0.5"], "--dense"),
    (["generate", "x", "--threads", "0"], "0"),
    (["generate", "x", "--file", "also.txt"], "also.txt|prompt"),
    (["generate", "x", "--unknown"], "unknown"),
    (["compare", "x", "--repeats", "0"], "0"),
    (["compare", "x", "--length", "-5"], "-5"),
    (["bench", "--lengths", "0"], "'0'"),
    (["bench", "--lengths", "12,twelve"], "twelve"),
    (["bench", "--lengths", "8,8"], "twice"),
    (["bench", "--ratios", "0.5,2"], "2"),
    (["bench", "--batch", "-1"], "-1"),
    (["bench", "--what", "everything"], "everything"),
    (["bench", "--json", "-", "--csv", "/nowhere/at/all.csv"], "nowhere"),
    (["frobnicate"], "frobnicate"),
]

FAILING = [
    (["generate", ""], "empty|prompt"),
    (["generate", "   ", "--no-chat"], "empty|prompt"),
    (["generate", LONG], "256"),
    (["generate", "x", "--max-new-tokens", "5000"], "256"),
    (["generate", "--file", "missing.txt"], "missing.txt"),
    (["generate", "--file", "binary.bin"], "binary.bin"),
    (["generate", "--file", "."], "folder|directory"),
    (["generate", "x", "--layers", "7", "--max-new-tokens", "2"], "layer 7"),
    (["generate", "x", "--device", "cuda:99"], "cuda:99"),
    (["compare", LONG], "256"),
    (["compare", "--length", "3"], "3"),
    (["bench", "--lengths", "9999"], "9999|256"),
]


def check(result, codes: tuple[int, ...], message: str) -> None:
    import re

    assert result.code in codes, (result.code, result.err)
    assert "Traceback" not in result.err + result.out
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.err
    assert re.search(message.replace("(", r"\("), errors[0]), errors[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "also.txt").write_text("text")
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00\x81" * 9)
    return tmp_path


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=lambda value: " ".join(value)[:40] if value else "")
def test_usage_errors(command, here: Path, tiny: Path, arguments, message: str) -> None:
    before = sorted(path.name for path in here.iterdir())
    model = ["--model", tiny] if arguments[0] != "frobnicate" else []
    check(command(*arguments, *model), (1, 2), message)
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize(("arguments", "message"), FAILING, ids=lambda value: " ".join(value)[:40] if value else "")
def test_inputs_that_do_not_fit(command, here: Path, tiny: Path, arguments, message: str) -> None:
    before = sorted(path.name for path in here.iterdir())
    check(command(*arguments, "--model", tiny), (1, 2), message)
    assert sorted(path.name for path in here.iterdir()) == before


@pytest.mark.parametrize("name", ["", "no/such/folder", "./nothing.gguf", "binary.bin", "."])
def test_models_that_are_none(command, here: Path, name: str) -> None:
    check(command("generate", "x", "--model", name), (1, 2), "error")


def test_a_result_that_cannot_be_written_fails_before_the_work(command, here: Path, tiny: Path) -> None:
    result = command("bench", "--model", tiny, "--lengths", "8", "--json", here / "no" / "such" / "file.json")
    check(result, (1, 2), "no")
