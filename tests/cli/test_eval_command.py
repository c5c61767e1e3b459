"""`stageprune eval` on texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stageprune as sp
from stageprune.evaluate import evaluating
from stageprune.evaluate.evaluation import Evaluation

OPTIONS = ("--prompts", "2", "--lengths", "60,90", "--answer-tokens", "4", "--threads", "1", "--dtype", "float32")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STAGEPRUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "answers"


def test_every_setting_in_one_table(command: Any, tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    sp.save_settings(file, sp.OnlineChannelPruning.preset("balanced"))
    output = tmp_path / "o.json"
    result = command(
        "eval", tiny, *OPTIONS, "--ratios", "0,1/2", "--channel-ratio", "0,0.4", "--settings", file, "-o", output
    )
    assert result.code == 0, result.err
    found = Evaluation.load(output)
    assert [row.name for row in found.rows] == [
        "dense",
        "channels 0.4",
        "layers 0.5",
        "layers 0.5 + channels 0.4",
        "mine",
    ]
    for row in found.rows:
        assert row.name in result.out
    assert "on the dense model's greedy answers" in result.out
    assert "on the given references" in result.out
    assert found.buckets == (60, 60, 90, 90)
    kl = found.metrics(found.rows[1], "answers")["kl"]
    assert kl.value > 0
    assert f"{kl.value:.3g} [{kl.lower:.3g}, {kl.upper:.3g}]" in result.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "mine.json", "o.json"]


def test_json_is_what_the_file_holds(command: Any, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    result = command("eval", tiny, *OPTIONS, "--json", "--output", output)
    assert result.code == 0, result.err
    data = json.loads(output.read_text())
    assert json.loads(result.out) == {key: data[key] for key in data if key not in ("kind", "version", "checksum")}
    assert [row["setting"]["name"] for row in data["rows"]] == ["dense", "layers 0.333"]
    assert set(data["rows"][0]["summary"]) == {"60", "90", "all"}


def test_own_data(command: Any, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"prompt": "abcdefgh", "answer": "xyz"}\n{"text": "' + "k" * 70 + '"}\n')
    result = command("eval", tiny, *OPTIONS, "--prompts", "5", "--data", data, "--json")
    assert result.code == 0, result.err
    assert "d.jsonl has 2 usable prompts, fewer than the 5 asked for" in result.err
    found = json.loads(result.out)
    assert found["buckets"] == [60, 90]
    assert [one["references"] and one["references"]["tokens"] for one in found["rows"][1]["scores"]] == [3, None]


def test_answers_are_kept_for_later_runs(
    command: Any, tiny: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    original = evaluating.greedy_answer

    def counted(*arguments: Any) -> Any:
        calls.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(evaluating, "greedy_answer", counted)
    runs = []
    for options, computed in (
        ((), 4),
        ((), 0),
        (("--no-cache",), 4),
        (("--answer-tokens", "3"), 4),
        (("--lengths", "60,90,100"), 2),
    ):
        calls.clear()
        result = command("eval", tiny, *OPTIONS, *options, "--json")
        assert result.code == 0, result.err
        assert len(calls) == computed, options
        runs.append(result.out)
    assert runs[0] == runs[1] == runs[2]
    assert len(list(own_cache.iterdir())) == 2
    for file in own_cache.iterdir():  # a damaged cache costs time, and is replaced
        file.write_text(file.read_text()[:-20])
    calls.clear()
    assert command("eval", tiny, *OPTIONS, "--json").out == runs[0]
    assert len(calls) == 4
    calls.clear()
    assert command("eval", tiny, *OPTIONS, "--json").out == runs[0]
    assert calls == []


def test_a_cache_that_cannot_be_written_is_no_problem(
    command: Any, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STAGEPRUNE_CACHE", str(tmp_path / "file"))
    assert command("eval", tiny, *OPTIONS).code == 0


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--ratios", "0"), 2, "nothing to measure"),
        (("--ratios", "33"), 2, "'33' is not at least 0"),
        (("--confidence", "1"), 2, "'1' is not"),
        (("--confidence", "0"), 2, "'0' is not above 0"),
        (("--lengths", "1"), 2, "--lengths must be at least 2"),
        (("--lengths", "255"), 1, "more than the model's context of 256"),
        (("--data", "missing.jsonl"), 1, "cannot read"),
        (("--settings", "missing.json"), 1, "cannot read"),
        (("--output", "no/folder/o.json"), 1, "there is no folder"),
        (("--layers", "importance"), 2, "needs --importance"),
    ],
    ids=["dense", "ratio", "confidence", "zero", "short", "long", "data", "settings", "output", "importance"],
)
def test_bad_input(command: Any, tiny: Path, options: tuple[str, ...], code: int, message: str) -> None:
    result = command("eval", tiny, *OPTIONS, *options)
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert result.err.count("error:") == 1


def test_other_settings_do_not_go_on_from_this_file(command: Any, tiny: Path, tmp_path: Path) -> None:
    from killing import killed_at

    output = tmp_path / "o.json"
    assert killed_at(8, ("eval", tiny, *OPTIONS, "--no-cache", "--output", output))
    result = command("eval", tiny, *OPTIONS, "--ratios", "1/4", "--output", output)
    assert result.code == 1
    assert "begun with other settings" in result.err
    assert "rows.layers 0.333" in result.err


def test_killed_with_a_cache(command: Any, tiny: Path, tmp_path: Path, own_cache: Path) -> None:
    """At each moment of writing, of the cache as well."""
    from killing import killed_at

    whole = tmp_path / "whole.json"
    arguments = ("eval", tiny, *OPTIONS, "--prompts", "1", "--lengths", "40", "--output")
    assert command(*arguments, whole).code == 0
    output = tmp_path / "o.json"
    kills = 0
    while True:
        for file in (*own_cache.iterdir(), *tmp_path.glob("o.json*")):
            file.unlink()
        if not killed_at(kills, (*arguments, output)):
            break
        kills += 1
        assert command(*arguments, output).code == 0
        assert output.read_bytes() == whole.read_bytes()
        assert [file.name.startswith(".") for file in own_cache.iterdir()] == [False]
    assert kills == 3 * 4 + 1


def test_baselines_beside_the_methods(command: Any, tiny: Path, tmp_path: Path) -> None:
    output = tmp_path / "o.json"
    chosen = ("--baseline", "layer-dropping=1/2", "--baseline", "wanda-sp=0.2", "--baseline", "random-channels")
    assert command("eval", tiny, *OPTIONS, *chosen, "-o", output).code == 0
    rows = Evaluation.load(output).rows
    assert [row.name for row in rows] == ["dense", "layer-dropping 0.5", "wanda-sp 0.2", "random-channels 0.2"]
    assert [row.setting["calibration"] is None for row in rows] == [True, True, False, True]
    assert all(row.ideal[90].prefill > 1 for row in rows[1:])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("nothing", "no such baseline; known: layer-dropping"),
        ("flap=2", "'2' is not at least 0"),
        ("flap=", "fraction"),
    ],
)
def test_wrong_baselines(command: Any, tiny: Path, text: str, says: str) -> None:
    shown = command("eval", tiny, *OPTIONS, "--baseline", text)
    assert shown.code == 2
    assert says in " ".join(shown.err.split())
