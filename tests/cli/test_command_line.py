"""What result files record of the command that wrote them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stageprune.cli.command_line import command_line, running


@pytest.mark.parametrize(
    ("arguments", "recorded"),
    [
        (["bench", "--lengths", "32,512"], "stageprune bench --lengths 32,512"),
        (["bench", "--model", "/home/me/model"], "stageprune bench --model model"),
        (["bench", "--model=/home/me/model", "--json", "~/b.json"], "stageprune bench --model=model --json b.json"),
        (["plan", "org/name", "-o", "docs/p.json"], "stageprune plan org/name -o docs/p.json"),
        (["plan", "-o", "../other/p.json"], "stageprune plan -o p.json"),
        (["plan", "a model"], "stageprune plan 'a model'"),
    ],
)
def test_folders_of_the_user_are_not_recorded(arguments: list[str], recorded: str) -> None:
    with running(arguments):
        assert command_line() == recorded
    assert command_line() is None


def test_results_say_which_command_wrote_them(command, tiny: Path, tmp_path: Path) -> None:
    result = command("bench", "--model", tiny, "--lengths", "8", "--repeats", "1", "--seconds", "0", "--json", "-")
    data = json.loads(result.out)
    assert data["command"] == f"stageprune bench --model {tiny.name} --lengths 8 --repeats 1 --seconds 0 --json -"
    options = ("--samples", "2", "--prompt-tokens", "8", "--response-tokens", "3", "--output", tmp_path / "i.json")
    assert command("analyze", tiny, *options, "--dtype", "float32").code == 0
    settings = json.loads((tmp_path / "i.json").read_text())["settings"]
    assert settings["command"].startswith(f"stageprune analyze {tiny.name} --samples 2")
    assert settings["command"].endswith("--output i.json --dtype float32")
    assert settings["system"]["threads"] >= 1
    assert str(tmp_path) not in json.dumps(data) + json.dumps(settings)
