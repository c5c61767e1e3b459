"""Wrong command lines: one clear line that names the value, the right exit code, no file touched."""

from __future__ import annotations

import io
import os
import re
import shutil
from collections.abc import Iterator
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
    (["generate", "x", "--channel-ratio", "1"], "'1'"),
    (["generate", "x", "--channel-ratio", "some"], "some"),
    (["generate", "x", "--partition-fraction", "1.1"], "1.1"),
    (["generate", "x", "--selection", "best"], "best"),
    (["generate", "x", "--channel-preset", "quick"], "quick"),
    (["generate", "x", "--channel-preset", "fast", "--channel-ratio", "0.2"], "--channel-ratio"),
    (["generate", "x", "--channel-backend", "gpu"], "gpu"),
    (["generate", "x", "--dense", "--channel-ratio", "0.2"], "--dense"),
    (["compare", "x", "--plot", "out.png"], "--channel-ratio"),
    (["bench", "--what", "ffn", "--shapes", "896"], "896"),
    (["bench", "--what", "ffn", "--shapes", "0x4"], "0x4"),
    (["bench", "--channel-ratio", "0.2,0.2"], "0.2,0.2"),
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
    (["generate", "x", "--threads", "99999999"], "99999999"),
    (["generate", "x", "--ratio", "1/3/3"], "1/3/3"),
    (["generate", "x", "--ratio", "inf"], "inf"),
    (["generate", "x", "--layers", "0-99999,5"], "layer 5"),
    (["generate", "x", "--layers", ""], "''"),
    (["generate", "x", "--layers", "1-2", "--ratio", "1/2"], "1-2"),
    (["generate", "x", "--top-p", "1.5", "--temperature", "1"], "1.5"),
    (["generate", "x", "--temperature", "inf"], "inf"),
    (["generate", "x", "--seed", "-1", "--temperature", "1"], "-1"),
    (["generate", "x", "y"], "y"),
    (["generate", "x", "--file", "also.txt"], "also.txt"),
    (["generate", "x", "--unknown"], "unknown"),
    (["compare", "x", "--repeats", "0"], "0"),
    (["compare", "x", "--length", "-5"], "-5"),
    (["bench", "--lengths", "0"], "'0'"),
    (["bench", "--lengths", "12,twelve"], "twelve"),
    (["bench", "--lengths", "8,8"], "twice"),
    (["bench", "--ratios", "0.5,2"], "2"),
    (["bench", "--batch", "-1"], "-1"),
    (["bench", "--what", "everything"], "everything"),
    (["bench", "--layers", "1-2"], "1-2"),
    (["bench", "--seconds", "-1"], "-1"),
    (["bench", "--batch", "99999999", "--lengths", "8"], "99999999"),
    (["bench", "--json", "same.out", "--csv", "same.out"], "same.out"),
    (["doctor", "x", "--ratio", "7"], "'7'"),
    (["frobnicate"], "frobnicate"),
]

FAILING = [
    (["generate", ""], "is empty"),
    (["generate", "   ", "--no-chat"], "is empty"),
    (["generate", LONG], "256"),
    (["generate", "x", "--max-new-tokens", "5000"], "256"),
    (["generate", "--file", "missing.txt"], "missing.txt"),
    (["generate", "--file", "binary.bin"], "binary.bin"),
    (["generate", "--file", "zeros.txt"], "zeros.txt"),
    (["generate", "--file", "empty.txt"], "empty.txt"),
    (["generate", "--file", "."], "directory"),
    (["generate", "x", "--layers", "7", "--max-new-tokens", "2"], "layer 7"),
    (["generate", "x", "--device", "cuda:99"], "cuda:99"),
    (["compare", LONG], "256"),
    (["compare", "--length", "3"], "3"),
    (["compare", "--length", "999999999"], "999999999"),
    (["bench", "--lengths", "9999"], "9999.+256"),
    (["bench", "--json", "-", "--csv", "/nowhere/at/all.csv"], "nowhere"),
    (["bench", "--csv", "."], "folder"),
]


CONTENT = {
    "also.txt": b"text",
    "binary.bin": b"\xff\xfe\x00\x81" * 9,
    "zeros.txt": b"a\0b",
    "empty.txt": b" \n",
    "config.json": b"{",
}


def check(result, code: int, message: str) -> None:
    """One line that says what is wrong; nothing else, and nothing on the output."""
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    errors = [line for line in result.err.splitlines() if line.startswith("error:")]
    assert len(errors) == 1, result.err
    assert re.search(message, errors[0]), errors[0]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working directory whose files must not change."""
    monkeypatch.chdir(tmp_path)
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    yield tmp_path
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == CONTENT


@pytest.fixture(scope="module")
def without_template(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(tiny, tmp_path_factory.mktemp("plain") / "plain")
    (folder / "chat_template.jinja").unlink()
    return folder


def name_of(value: object) -> str:
    return " ".join(value)[:40] if isinstance(value, list) else ""


@pytest.mark.parametrize(("arguments", "message"), USAGE, ids=name_of)
def test_wrong_command_lines(command, here: Path, arguments: list[str], message: str) -> None:
    check(command(*arguments), 2, message)


@pytest.mark.parametrize(("arguments", "message"), FAILING, ids=name_of)
def test_inputs_that_cannot_work(command, here: Path, tiny: Path, arguments: list[str], message: str) -> None:
    check(command(*arguments, "--model", tiny), 1, message)


def test_no_chat_template(command, here: Path, without_template: Path) -> None:
    arguments = ["generate", "a t", "--model", without_template, "--max-new-tokens", "2"]
    check(command(*arguments, "--chat"), 1, "no chat template")
    assert command(*arguments).code == 0


@pytest.mark.parametrize("name", ["", "no/such/folder", "./nothing.gguf", "binary.bin", ".", "config.json"])
@pytest.mark.parametrize("arguments", [["generate", "x", "--model"], ["doctor"]], ids=name_of)
def test_models_that_are_none(command, here: Path, arguments: list[str], name: str) -> None:
    check(command(*arguments, name), 1, re.escape(name) if name != "." else "config")


@pytest.mark.parametrize("content", [b"", b" \n\t", b"\xff\xfe", b"a\0b"])
def test_standard_input_that_is_no_prompt(command, here: Path, monkeypatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content)))
    check(command("generate", "-"), 1, "the standard input is")


def test_no_prompt_at_a_terminal(command, here: Path, monkeypatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(b""))
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stdin", terminal)
    check(command("generate"), 2, "no prompt")


def test_a_message_is_one_line_whatever_the_input_holds(command, here: Path) -> None:
    check(command("generate", "x", "--ratio", "1\n/\x1b[31m3"), 2, "ratio")


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(command, here: Path) -> None:
    here.chmod(0o500)
    check(command("bench", "--csv", "new.csv"), 1, "not writable")
    here.chmod(0o700)
