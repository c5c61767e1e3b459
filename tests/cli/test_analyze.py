"""`stageprune analyze` on a tiny model: its numbers, its files, and going on after it was killed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import stageprune as sp
from killing import MOMENTS_OF_A_WRITE, killed_at
from stageprune.evaluate.analysis import analyze
from stageprune.evaluate.samples import load_prompts

OPTIONS = ("--prompt-tokens", "12", "--response-tokens", "5", "--batch", "2", "--threads", "1", "--dtype", "float32")


def test_the_numbers_are_the_librarys(command, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "i.json"
    result = command("analyze", tiny, "--samples", "5", "--seed", "3", *OPTIONS, "--output", output, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    loaded = sp.load(str(tiny), dtype="float32")
    prompts = load_prompts(loaded.tokenizer, None, 5, 12, 3)
    scores = analyze(loaded.model, prompts.tokens, response_tokens=5, seed=3, batch=2, skipped=())
    importance = sp.Importance.load(output)
    assert importance.samples == scores
    assert data == json.loads(output.read_text()) == importance.to_dict()
    assert data["model"]["name"] == tiny.name
    assert data["settings"]["samples"] == 5
    assert str(tmp_path) not in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["i.json"]


def test_the_table(command, tiny: Path) -> None:
    result = command("analyze", tiny, "--samples", "31", *OPTIONS)
    assert result.code == 0, result.err
    data = json.loads(command("analyze", tiny, "--samples", "31", *OPTIONS, "--json").out)
    for layer in data["layers"]:
        for stage in ("prefill", "decode"):
            assert f"{layer[stage]['importance']:.3g} ± {layer[stage]['standard_error']:.2g}" in result.out
    assert data["layers"][-1]["prefill"]["importance"] == 0
    assert "31 prompts from built-in text" in result.out
    assert "standard errors off: as chance has it" in result.out


def test_data_with_fewer_rows(command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text("\n".join(json.dumps({"prompt": f"a t {index}"}) for index in range(3)))
    result = command("analyze", tiny, "--data", tmp_path / "d.jsonl", *OPTIONS, "--json")
    assert result.code == 0, result.err
    assert "d.jsonl has 3 usable prompts, fewer than --samples 200" in result.err
    assert json.loads(result.out)["settings"]["data"] == "d.jsonl"
    assert len(json.loads(result.out)["samples"]) == 3


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a copy of this process")
def test_killed_and_restarted_gives_the_same_file(command, tiny: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        options = ["--samples", "24", *OPTIONS, "--response-tokens", "24", "--batch", "1"]
        return ["analyze", str(tiny), *options, "--output", str(tmp_path / name)]

    (tmp_path / "whole").mkdir()
    assert command(*arguments("whole/i.json")).code == 0  # the file records its name
    partial = tmp_path / "i.json.partial"
    found = 9  # of 24
    assert killed_at(found * MOMENTS_OF_A_WRITE, arguments("i.json"))
    assert len(json.loads(partial.read_text())["samples"]) == found
    assert not (tmp_path / "i.json").exists()
    result = command(*arguments("i.json"))
    assert result.code == 0, result.err
    assert f"going on after {found} of 24 samples" in result.err
    assert (tmp_path / "i.json").read_bytes() == (tmp_path / "whole" / "i.json").read_bytes()
    assert not partial.exists()


@pytest.fixture
def interrupted(command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A partial file with 2 of 6 samples."""
    output = tmp_path / "i.json"
    from stageprune.evaluate.checkpoint import Checkpoint

    save = Checkpoint.save

    def stop(self: Any, scores: Any) -> None:
        save(self, scores)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        assert command("analyze", tiny, "--samples", "6", *OPTIONS, "--output", output).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["i.json.partial"]
    return output


def test_other_settings_are_refused_by_name(command, tiny: Path, interrupted: Path) -> None:
    before = interrupted.with_name("i.json.partial").read_bytes()
    result = command("analyze", tiny, "--samples", "7", "--seed", "1", *OPTIONS, "--output", interrupted)
    assert result.code == 1
    assert "settings.samples: 6 there, 7 now" in result.err
    assert "settings.seed: 0 there, 1 now" in result.err
    assert "i.json.partial' to begin anew" in result.err
    assert interrupted.with_name("i.json.partial").read_bytes() == before
    assert not interrupted.exists()


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-200], lambda content: content.replace("0.", "1.", 1), lambda content: ""],
    ids=["cut-off", "altered", "empty"],
)
def test_a_damaged_partial_file_is_refused(command, tiny: Path, interrupted: Path, damage) -> None:
    partial = interrupted.with_name("i.json.partial")
    partial.write_text(damage(partial.read_text()))
    result = command("analyze", tiny, "--samples", "6", *OPTIONS, "--output", interrupted)
    assert result.code == 1
    assert "i.json.partial" in result.err
    assert "damaged" in result.err


def test_a_plot(command, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = command("analyze", tiny, "--samples", "3", *OPTIONS, "--plot", tmp_path / "p.svg")
    assert result.code == 0, result.err
    assert (tmp_path / "p.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--samples", "0"), 2, "'0'"),
        (("--seed", "-1"), 2, "'-1'"),
        (("--batch", "many"), 2, "'many'"),
        (("--prompt-tokens", "1"), 1, "at least 2 tokens"),
        (("--prompt-tokens", "252"), 2, "context of 256"),
        (("--data", "missing.jsonl"), 1, "missing.jsonl"),
        (("--output", "missing/i.json"), 1, "missing"),
        (("--output", "."), 1, "folder"),
        (("--plot", "p.jpg"), 1, "p.jpg"),
        (("--output", "p.png", "--plot", "p.png"), 2, "same file"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else None,
)
def test_wrong_options(command, tiny: Path, tmp_path: Path, monkeypatch, options, code: int, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("analyze", tiny, *OPTIONS, *options)
    assert result.code == code, result.err
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert list(tmp_path.iterdir()) == []
