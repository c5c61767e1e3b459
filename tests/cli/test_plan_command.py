"""`stageprune plan`, and what the other commands make of its file and of importance scores."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import stageprune as sp
from stageprune.evaluate.candidates import rule_candidates, subset_candidates
from stageprune.evaluate.plan import Bound, Plan
from stageprune.evaluate.planning import measure
from stageprune.evaluate.text import held_out_prompts
from stageprune.prefill.importance import Drift, SampleScore

OPTIONS = ("--prompts", "2", "--prompt-tokens", "120", "--answer-tokens", "3", "--threads", "1", "--dtype", "float32")
SHORT = ("--max-new-tokens", "4", "--dtype", "float32", "--json")


@pytest.fixture(scope="module")
def deep(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random model of four layers, and a tokenizer."""
    folder = tmp_path_factory.mktemp("deep") / "four-layers"
    loaded = sp.load(str(tiny), dtype="float32")
    config = loaded.model.config
    config.num_hidden_layers = 4
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(config)
    for parameter in model.parameters():  # fresh weights are so small that skipping layers would hardly matter
        torch.nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, 0.3)
    model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def importance(command, deep: Path, tmp_path: Path) -> Path:
    path = tmp_path / "importance.json"
    arguments = ("--samples", "3", "--prompt-tokens", "12", "--response-tokens", "4", "--threads", "1")
    assert command("analyze", deep, *arguments, "--dtype", "float32", "--output", path).code == 0
    return path


def test_the_numbers_are_the_librarys(command, deep: Path, tmp_path: Path) -> None:
    output = tmp_path / "stageprune.json"
    result = command("plan", deep, "--max-kl", "0.5", *OPTIONS, "-o", output, "--json")
    assert result.code == 0, result.err
    loaded = sp.load(str(deep), dtype="float32")
    prompts = held_out_prompts(loaded.tokenizer, 2, 120)
    points = measure(loaded.model, prompts, subset_candidates(4), answer_tokens=3, speed_tokens=120)
    plan = Plan.load(output)
    assert plan.points == points, "a model of few layers: every set of layers"
    assert plan.bound == Bound(max_kl=0.5)
    data = json.loads(result.out)
    assert data == json.loads(json.dumps(plan.to_dict()))
    assert (data["settings"]["search"], data["model"]["name"]) == ("subsets", deep.name)
    assert str(tmp_path) not in result.out
    assert sp.load_settings(output, loaded.model) == (plan.method,)
    assert [path.name for path in tmp_path.iterdir()] == ["stageprune.json"]


def test_the_table(command, deep: Path, importance: Path, tmp_path: Path) -> None:
    arguments = ("plan", deep, "--search", "rules", "--importance", importance, *OPTIONS)
    data = json.loads(command(*arguments, "--max-kl", "0", "--json").out)
    scores = [score.mean for score in sp.Importance.load(importance).scores("prefill")]
    measured = {tuple(point["layers"]): tuple(point["rules"]) for point in data["points"]}
    assert measured == rule_candidates(4, scores)
    some = sorted(data["points"], key=lambda point: point["kl"])[2]
    result = command(*arguments, "--max-kl", some["kl"] * 1.001)
    assert result.code == 0, result.err
    assert "Best within the bound" in result.out
    for point in data["points"]:
        if point["on_frontier"]:
            assert f"{point['kl']:.3g} ± {point['kl_error']:.2g}" in result.out
            assert f"{point['ideal_speedup']:.2f}x" in result.out


def test_a_bound_that_nothing_meets(command, deep: Path, tmp_path: Path) -> None:
    """The last layer costs nothing, but its measured divergence is above 0 by rounding, or below."""
    result = command("plan", deep, "--max-kl", "0", "--min-agreement", "1", *OPTIONS, "-o", tmp_path / "s.json")
    assert result.code == 0, result.err
    best = Plan.load(tmp_path / "s.json").best
    assert best.layers in ((), (3,))
    if not best.layers:
        assert "the setting skips nothing" in result.out


@pytest.fixture
def settings(command, deep: Path, tmp_path: Path) -> Path:
    path = tmp_path / "stageprune.json"
    assert command("plan", deep, "--min-agreement", "0", *OPTIONS, "-o", path).code == 0
    assert Plan.load(path).best.layers == (0, 1, 2, 3)
    return path


def test_other_commands_take_the_file(command, deep: Path, settings: Path) -> None:
    result = command("generate", "a b c", "--model", deep, "--settings", settings, *SHORT)
    assert result.code == 0, result.err
    expected = command("generate", "a b c", "--model", deep, "--layers", "0-3", *SHORT)
    answers = [json.loads(each.out) for each in (result, expected)]
    assert answers[0]["report"]["skipped_layers"] == [0, 1, 2, 3]
    assert answers[0]["new_tokens"] == answers[1]["new_tokens"]
    result = command("compare", "a b c", "--model", deep, "--settings", settings, "--repeats", "1", *SHORT)
    assert json.loads(result.out)["report"]["skipped_layers"] == [0, 1, 2, 3], result.err
    grid = ("--lengths", "8", "--repeats", "1", "--seconds", "0", "--json", "-")
    result = command("bench", "--model", deep, "--settings", settings, *grid)
    assert [cell["skipped_layers"] for cell in json.loads(result.out)["cells"]] == [4], result.err


def test_other_commands_take_importance(command, deep: Path, importance: Path) -> None:
    chosen = ("--layers", "importance", "--importance", importance)
    for options, contiguous in (((), True), (("--contiguous",), True), (("--free",), False)):
        method = sp.PrefillOnlyPruning(0.5, "importance", importance=importance, contiguous=contiguous)
        result = command("generate", "a b", "--model", deep, "--ratio", "1/2", *chosen, *options, *SHORT)
        assert result.code == 0, result.err
        report = json.loads(result.out)["report"]
        assert report["methods"] == [json.loads(method.to_json())]
        loaded = sp.load(str(deep))
        with sp.prune(loaded.model, method) as handle:
            assert tuple(report["skipped_layers"]) == handle.report().skipped_layers
    grid = ("--lengths", "8", "--repeats", "1", "--seconds", "0", "--ratios", "1/4,1/2", "--json", "-")
    result = command("bench", "--model", deep, *chosen, *grid)
    assert [cell["skipped_layers"] for cell in json.loads(result.out)["cells"]] == [1, 2], result.err
    assert command("compare", "a b", "--model", deep, *chosen, "--repeats", "1", *SHORT).code == 0
    assert command("doctor", deep, *chosen, "--json").code == 0


def test_files_of_another_model_are_refused(command, tiny: Path, importance: Path, settings: Path) -> None:
    """The tiny model has two layers, the files speak of four."""
    by_importance = ("--layers", "importance", "--importance", importance)
    for arguments in (
        ("generate", "a", "--model", tiny, "--settings", settings),
        ("compare", "a", "--model", tiny, "--settings", settings),
        ("bench", "--model", tiny, "--settings", settings),
        ("generate", "a", "--model", tiny, *by_importance),
        ("compare", "a", "--model", tiny, *by_importance),
        ("bench", "--model", tiny, *by_importance),
        ("plan", tiny, "--max-kl", "1", "--importance", importance, *OPTIONS),
    ):
        result = command(*arguments)
        assert result.code == 1, arguments
        assert "is of another model (num_hidden_layers: 4 there, 2 here; the weights differ)" in result.err
        assert result.out == ""


def test_importance_on_the_same_data_is_pointed_out(command, tiny: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text("\n".join(json.dumps({"text": f"a t {index}"}) for index in range(3)))
    path, options = tmp_path / "i.json", ("--data", data, "--prompt-tokens", "12")
    assert command("analyze", tiny, *options, "--response-tokens", "2", "--output", path).code == 0
    result = command("plan", tiny, "--max-kl", "9", "--importance", path, *options, "--answer-tokens", "2")
    assert result.code == 0, result.err
    assert "the importance scores are from d.jsonl, too" in result.err
    assert "d.jsonl has 3 usable prompts, fewer than --prompts 24" in result.err
    assert "prompts: 3 of d.jsonl" in result.out


@pytest.fixture
def interrupted(command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A partial file with the first of two answers."""
    output = tmp_path / "s.json"
    from stageprune.evaluate.checkpoint import Checkpoint

    save = Checkpoint.save

    def stop(self: Any, state: Any) -> None:
        save(self, state)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Checkpoint, "save", stop)
        assert command("plan", tiny, "--max-kl", "1", *OPTIONS, "--output", output).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["s.json.partial"]
    return output


def test_other_settings_are_refused_by_name(command, tiny: Path, interrupted: Path) -> None:
    before = interrupted.with_name("s.json.partial").read_bytes()
    result = command("plan", tiny, "--max-kl", "1", *OPTIONS, "--answer-tokens", "4", "--output", interrupted)
    assert result.code == 1
    assert "settings.answer_tokens: 3 there, 4 now" in result.err
    assert "s.json.partial' to begin anew" in result.err
    assert interrupted.with_name("s.json.partial").read_bytes() == before
    assert not interrupted.exists()


def test_another_bound_goes_on_with_the_same_measurements(command, tiny: Path, interrupted: Path) -> None:
    result = command("plan", tiny, "--min-agreement", "1/2", *OPTIONS, "--output", interrupted)
    assert result.code == 0, result.err
    assert "going on" in result.err
    assert Plan.load(interrupted).bound == Bound(min_agreement=0.5)


@pytest.mark.parametrize(
    "damage",
    [lambda content: content[:-200], lambda content: content.replace("3", "4", 1), lambda content: ""],
    ids=["cut-off", "altered", "empty"],
)
def test_a_damaged_partial_file_is_refused(command, tiny: Path, interrupted: Path, damage) -> None:
    partial = interrupted.with_name("s.json.partial")
    partial.write_text(damage(partial.read_text()))
    result = command("plan", tiny, "--max-kl", "1", *OPTIONS, "--output", interrupted)
    assert result.code == 1
    assert "s.json.partial" in result.err
    assert "damaged" in result.err


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    sample = SampleScore(0, 5, 2, 1.0, (1.0, 0.0), (1.0, 1.0), Drift((), (), (), ()))
    sp.Importance({}, {}, (sample,)).save("i.json")
    sp.save_settings("s.json", sp.PrefillOnlyPruning())
    (tmp_path / "cut.json").write_text((tmp_path / "s.json").read_text()[:-40])
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("plan",), 2, "--max-kl"),
        (("plan", "--max-kl", "-1"), 2, "'-1'"),
        (("plan", "--max-kl", "nan"), 2, "'nan'"),
        (("plan", "--max-kl", "low"), 2, "'low'"),
        (("plan", "--min-agreement", "95"), 2, "'95'"),
        (("plan", "--max-kl", "1", "--search", "best"), 2, "best"),
        (("plan", "--max-kl", "1", "--prompt-tokens", "1"), 2, "at least 2"),
        (("plan", "--max-kl", "1", "--prompt-tokens", "9999"), 1, "--answer-tokens"),
        (("plan", "--max-kl", "1", "--importance", "missing.json"), 1, "missing.json"),
        (("plan", "--max-kl", "1", "--importance", "s.json"), 1, "no stageprune-importance file"),
        (("plan", "--max-kl", "1", "--output", "."), 1, "folder"),
        (("generate", "a", "--settings", "missing.json"), 1, "missing.json"),
        (("generate", "a", "--settings", "cut.json"), 1, "damaged"),
        (("generate", "a", "--settings", "i.json"), 1, "no stageprune-settings file"),
        (("generate", "a", "--settings", "s.json", "--ratio", "0.5"), 2, "--settings"),
        (("generate", "a", "--settings", "s.json", "--dense"), 2, "--dense"),
        (("compare", "a", "--settings", "s.json", "--layers", "first"), 2, "--settings"),
        (("bench", "--settings", "s.json", "--channel-ratio", "0.2"), 2, "--settings"),
        (("bench", "--settings", "s.json", "--ratios", "0,0.2"), 2, "--settings"),
        (("bench", "--what", "ffn", "--settings", "s.json"), 2, "--what ffn"),
        (("generate", "a", "--layers", "importance"), 2, "needs --importance"),
        (("generate", "a", "--importance", "i.json"), 2, "--layers importance only"),
        (("generate", "a", "--free", "--layers", "last"), 2, "--layers importance only"),
        (("bench", "--layers", "importance"), 2, "needs --importance"),
        (("doctor", "--layers", "importance", "--importance", "missing.json"), 1, "missing.json"),
    ],
    ids=lambda value: "-".join(value).replace("--", "").replace(".", "") if isinstance(value, tuple) else None,
)
def test_wrong_options(command, tiny: Path, files: Path, arguments, code: int, message: str) -> None:
    before = sorted(path.name for path in files.iterdir())
    verb, *options = arguments
    model = (tiny,) if verb == "plan" else () if verb == "doctor" else ("--model", tiny)
    result = command(verb, *model, *options) if verb == "plan" else command(verb, *options, *model)
    assert result.code == code, result.err
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert result.out == ""
    assert sorted(path.name for path in files.iterdir()) == before


@pytest.mark.parametrize("name", ["plan", "analyze"])
def test_what_is_read_is_not_overwritten(command, tiny: Path, importance: Path, tmp_path: Path, name: str) -> None:
    data = tmp_path / "mine.txt"
    data.write_text("a t a t " * 50)
    scores = importance.read_bytes()
    arguments = ["plan", tiny, "--max-kl", "1"] if name == "plan" else ["analyze", tiny]
    for option, file in [("--data", data), ("--importance", importance)][: 2 if name == "plan" else 1]:
        result = command(*arguments, option, file, "-o", file)
        assert result.code == 2, result.err
        assert f"--output would overwrite the file of {option}" in result.err
    assert data.read_text() == "a t a t " * 50
    assert importance.read_bytes() == scores


def test_too_many_subsets(command, deep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stageprune.evaluate.candidates.MOST_SUBSETS", 4)
    result = command("plan", deep, "--max-kl", "1", "--search", "subsets", *OPTIONS, "-o", tmp_path / "s.json")
    assert result.code == 1
    assert "4 layers have more subsets than the 4" in result.err
    assert list(tmp_path.iterdir()) == []
