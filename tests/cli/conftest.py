"""A tiny model for the commands, and a way to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from stageprune.cli import common
from stageprune.cli.app import run
from stageprune.models import load
from tiny import write_gguf


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of two layers and a context of 256 tokens, and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    loaded = load(str(write_gguf(folder / "tiny.gguf")), dtype="float32")
    loaded.model.save_pretrained(folder / "model")
    loaded.tokenizer.save_pretrained(folder / "model")
    return folder / "model"


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run a command line in this process."""
    monkeypatch.setenv("COLUMNS", "200")  # for what runs in a process of its own
    for console in (common.console, common.output):
        monkeypatch.setattr(console, "_width", 200)  # read from COLUMNS when they were made

    def execute(*arguments: object) -> Result:
        code = run([str(argument) for argument in arguments])
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return execute
