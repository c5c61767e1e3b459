"""`stageprune calibrate` on a tiny model: its files and numbers, their use, and going on after it was killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import stageprune as sp
from stageprune.evaluate.calibration import Reading, solve
from stageprune.evaluate.samples import load_prompts
from stageprune.evaluate.sums_file import SumsFile
from stageprune.prefill.projections import RECORD, TENSORS, KVProjections

OPTIONS = ("--layers", "0-1", "--prompt-tokens", "24", "--threads", "1", "--dtype", "float32")


@pytest.fixture
def fitted(command, tiny: Path, tmp_path: Path) -> Path:
    result = command("calibrate", tiny, "--samples", "6", *OPTIONS, "-o", tmp_path / "fit")
    assert result.code == 0, result.err
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]
    return tmp_path / "fit"


def test_the_numbers_are_the_librarys(command, tiny: Path, tmp_path: Path) -> None:
    arguments = ["--samples", "12", "--seed", "3", "--ridge", "0.01", "--rank", "5", *OPTIONS]
    result = command("calibrate", tiny, *arguments, "--output", tmp_path / "fit", "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    loaded = sp.load(str(tiny), dtype="float32")
    reading = Reading(loaded.model, (0, 1))
    reading.read(load_prompts(loaded.tokenizer, None, 12, 24, 3, questions=True).tokens)
    projections = KVProjections.load(tmp_path / "fit")
    for layer, measured in zip(solve(reading, 0.01, 5), data["measured"], strict=True):
        stored = projections.corrections[layer.layer]
        for ours, theirs in zip(
            (*layer.correction.matrix, layer.correction.bias), (*stored.matrix, stored.bias), strict=True
        ):
            assert torch.equal(ours, theirs)
        assert measured["layer"] == layer.layer
        assert [one["fitted"] for one in measured["unexplained"]] == [one.fitted for one in layer.unexplained]
    record = json.loads((tmp_path / "fit" / RECORD).read_text())
    assert {name: record[name] for name in ("model", "settings", "measured", "layers")} == {
        name: data[name] for name in ("model", "settings", "measured", "layers")
    }
    assert data["model"]["name"] == tiny.name
    assert data["settings"]["samples"] == 12
    assert data["settings"]["held_out"] == 1
    assert (data["settings"]["ridge"], data["settings"]["rank"]) == (0.01, 5)
    with sp.prune(loaded.model, sp.load(tmp_path / "fit")) as handle:
        assert data["extra_weight_bytes"] == handle.report().extra_weight_bytes > 0
    assert str(tmp_path) not in result.out
    assert [path.name for path in tmp_path.iterdir()] == ["fit"]


def test_tokens_can_all_count_the_same(command, tiny: Path, tmp_path: Path) -> None:
    """And by default they do not."""
    corrections = []
    for weights in ((), ("--weights", "equal"), ("--weights", "attention")):
        folder = tmp_path / f"fit{len(corrections)}"
        result = command("calibrate", tiny, "--samples", "4", *OPTIONS, *weights, "-o", folder)
        assert result.code == 0, result.err
        projections = KVProjections.load(folder)
        assert projections.record["settings"]["weights"] == (weights or ("", "attention"))[1]
        corrections.append(projections.corrections[1].whole)
    assert torch.equal(corrections[0], corrections[2])
    assert not torch.equal(corrections[0], corrections[1])


def test_the_table(command, tiny: Path, tmp_path: Path) -> None:
    arguments = ["calibrate", tiny, "--samples", "6", "--rank", "4", *OPTIONS, "-o", tmp_path / "fit"]
    result = command(*arguments)
    assert result.code == 0, result.err
    measured = json.loads((tmp_path / "fit" / RECORD).read_text())["measured"]
    for layer in measured:
        shares = {(one["part"], one["text"]): one for one in layer["unexplained"]}
        for part in ("keys", "values"):
            for name in ("own", "full_rank", "fitted"):
                cell = f"{shares[part, 'held_out'][name]:.1%} ({shares[part, 'fit'][name]:.1%})"
                assert cell in result.out
    assert "layers 0-1, fitted on 5 prompts from built-in text with questions, measured on 1 others" in result.out
    assert "Extra memory: " in result.out


def test_a_fit_replaces_an_earlier_one(command, tiny: Path, fitted: Path) -> None:
    before = (fitted / TENSORS).read_bytes()
    assert command("calibrate", tiny, "--samples", "6", *OPTIONS, "-o", fitted).code == 0
    assert (fitted / TENSORS).read_bytes() == before
    assert command("calibrate", tiny, "--samples", "6", "--ridge", "1", *OPTIONS, "-o", fitted).code == 0
    assert (fitted / TENSORS).read_bytes() != before
    assert [path.name for path in fitted.parent.iterdir()] == ["fit"]


def test_generate_compare_and_bench_use_it(command, tiny: Path, fitted: Path) -> None:
    common = ["-m", tiny, "--projections", fitted, "--dtype", "float32", "--threads", "1"]
    result = command("generate", "a t a t a t", *common, "--max-new-tokens", "3", "--json")
    assert result.code == 0, result.err
    report = json.loads(result.out)["report"]
    assert report["skipped_layers"] == [0, 1]
    assert report["extra_weight_bytes"] > 0
    result = command("compare", "a t a t a t", *common, "--max-new-tokens", "3", "--repeats", "1", "--json")
    assert result.code == 0, result.err
    assert json.loads(result.out)["report"]["extra_weight_bytes"] > 0
    speed = ["--lengths", "16", "--repeats", "1", "--seconds", "0"]
    result = command("bench", *common, *speed)
    assert result.code == 0, result.err
    assert "2 layers, fitted" in result.out
    result = command("bench", *common, *speed, "--json", "-", "--channel-ratio", "0.2")
    assert result.code == 0, result.err
    (cell,) = json.loads(result.out)["cells"]
    assert (cell["skipped_layers"], cell["ratio"]) == (2, None)


KILLED_AT_RANDOM = """
import json, os, random, signal, sys, threading
from stageprune.cli.app import run
import transformers, stageprune.models, stageprune.evaluate.calibration
from stageprune.prefill.fitting import Fitter

arguments, chance, read, MOST = json.loads(sys.argv[1]), random.Random(1), Fitter.read, 8
for attempt in range(100):
    delay = chance.uniform(0, 0.15)
    child = os.fork()
    if child == 0:  # before torch has computed anything, so that no threads are missing
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        prompts = 0

        def counted_read(self, *args):
            global prompts
            prompts += 1
            if prompts == 1:
                timer.start()
            if prompts > MOST:  # a fast machine must not be done before its time is up
                os.kill(os.getpid(), signal.SIGKILL)
            return read(self, *args)

        Fitter.read = counted_read
        os._exit(run(arguments))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
    if status != -signal.SIGKILL:
        break
"""


@pytest.mark.slow
def test_killed_at_random_and_restarted_gives_the_same_bytes(command, tiny: Path, tmp_path: Path) -> None:
    def arguments(name: str) -> list[str]:
        options = [*OPTIONS, "--samples", "30", "--prompt-tokens", "48", "--checkpoint", "1"]
        return ["calibrate", str(tiny), *options, "-o", str(tmp_path / name)]

    assert command(*arguments("whole")).code == 0
    script = [sys.executable, "-c", KILLED_AT_RANDOM, json.dumps(arguments("fit"))]
    process = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    statuses = [int(line) for line in process.stdout.split()]
    assert statuses[-1] == 0, process.stdout + process.stderr
    assert statuses[:-1] == [-signal.SIGKILL] * (len(statuses) - 1)
    assert len(statuses) >= 4  # 30 prompts, at most 8 of them before it is killed
    for name in (TENSORS, RECORD):
        assert (tmp_path / "fit" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit", "whole"]


KILLED_WHILE_WRITING = """
import json, os, signal, sys
from pathlib import Path
from stageprune.cli.app import run
import transformers, stageprune.models, stageprune.evaluate.calibration
from stageprune.evaluate import sums_file
from stageprune.prefill import projections
from safetensors.torch import load_file

arguments = json.loads(sys.argv[1])
folder = arguments[-1]
real_save, real_replace = sums_file.save_file, os.replace
attempt = 0
while True:
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.dup2(1, 2)
        partial = Path(folder + ".partial")
        if partial.exists():  # what is there is whole; begin anew
            load_file(partial)
            partial.unlink()
        if os.path.exists(folder):
            projections.KVProjections.load(folder)
        steps = 0

        def step():
            global steps
            steps += 1
            if steps > attempt:
                os.kill(os.getpid(), signal.SIGKILL)

        def save(tensors, path, **options):
            step()  # before, half written, and written
            real_save(tensors, path, **options)
            content = Path(path).read_bytes()
            Path(path).write_bytes(content[: len(content) // 2])
            step()
            Path(path).write_bytes(content)
            step()

        def replace(source, target):
            step()
            real_replace(source, target)
            step()

        sums_file.save_file = projections.save_file = save
        os.replace = replace
        os._exit(run(arguments))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
    if status != -signal.SIGKILL:
        break
    attempt += 1
"""


@pytest.mark.slow
def test_killed_at_every_step_of_writing(command, tiny: Path, tmp_path: Path) -> None:
    """Each process gets one step further than the one before; an earlier folder is whole or away, never broken."""
    arguments = ["calibrate", str(tiny), *OPTIONS, "--samples", "2", "--checkpoint", "1"]
    assert command(*arguments, "-o", tmp_path / "whole").code == 0
    assert command(*arguments, "--ridge", "1", "-o", tmp_path / "fit").code == 0
    script = [sys.executable, "-c", KILLED_WHILE_WRITING, json.dumps([*arguments, "-o", str(tmp_path / "fit")])]
    process = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    statuses = [int(line) for line in process.stdout.split()]
    assert statuses[-1] == 0, process.stdout + process.stderr
    assert set(statuses[:-1]) == {-signal.SIGKILL}
    assert len(statuses) > 15
    for name in (TENSORS, RECORD):
        assert (tmp_path / "fit" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fit", "whole"]


@pytest.fixture
def interrupted(command, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The name of a folder whose partial file has 2 of 6 samples."""
    save = SumsFile.save

    def stop(self: Any, samples: int, tensors: Any) -> None:
        save(self, samples, tensors)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SumsFile, "save", stop)
        arguments = ["--samples", "6", "--checkpoint", "2", *OPTIONS, "-o", tmp_path / "fit"]
        assert command("calibrate", tiny, *arguments).code == 130
    assert [path.name for path in tmp_path.iterdir()] == ["fit.partial"]
    return tmp_path / "fit"


def test_it_goes_on_with_another_ridge(command, tiny: Path, interrupted: Path) -> None:
    """What was read does not depend on it."""
    arguments = ["--samples", "6", "--ridge", "0.5", "--rank", "3", *OPTIONS]
    result = command("calibrate", tiny, *arguments, "-o", interrupted)
    assert result.code == 0, result.err
    assert "going on after 2 of 6 samples" in result.err
    assert command("calibrate", tiny, *arguments, "-o", interrupted.with_name("whole")).code == 0
    assert (interrupted / TENSORS).read_bytes() == (interrupted.with_name("whole") / TENSORS).read_bytes()


def test_other_settings_are_refused_by_name(command, tiny: Path, interrupted: Path) -> None:
    partial = interrupted.with_name("fit.partial")
    before = partial.read_bytes()
    options = [option if option != "0-1" else "1" for option in OPTIONS]
    result = command("calibrate", tiny, "--samples", "7", "--seed", "1", *options, "-o", interrupted)
    assert result.code == 1
    assert "settings.samples: 6 there, 7 now" in result.err
    assert "settings.seed: 0 there, 1 now" in result.err
    assert "settings.layers: [0, 1] there, [1] now" in result.err
    assert "fit.partial' to begin anew" in result.err
    assert partial.read_bytes() == before
    assert not interrupted.exists()


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-200],
        lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        lambda content: content.replace(b'\\"samples\\": 2', b'\\"samples\\": 4'),
        lambda content: b"",
    ],
    ids=["cut-off", "altered", "altered record", "empty"],
)
def test_a_damaged_partial_file_is_refused(command, tiny: Path, interrupted: Path, damage) -> None:
    partial = interrupted.with_name("fit.partial")
    content = damage(partial.read_bytes())
    assert content != partial.read_bytes()
    partial.write_bytes(content)
    result = command("calibrate", tiny, "--samples", "6", *OPTIONS, "-o", interrupted)
    assert result.code == 1
    assert "fit.partial" in result.err
    assert "damaged" in result.err
    assert partial.read_bytes() == content
    assert not interrupted.exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (("--samples", "0"), 2, "'0'"),
        (("--samples", "1"), 1, "at least 2 samples"),
        (("--ridge", "0"), 2, "'0'"),
        (("--ridge", "nan"), 2, "'nan'"),
        (("--rank", "0"), 2, "'0'"),
        (("--rank", "64"), 1, "less than 64"),
        (("--ratio", "0.1"), 2, "--ratio"),
        (("--layers", "7"), 1, "layer 7"),
        (("--prompt-tokens", "1"), 1, "at least 2 tokens"),
        (("--prompt-tokens", "257"), 2, "context of 256"),
        (("--data", "missing.jsonl"), 1, "missing.jsonl"),
        (("-o", "missing/fit"), 1, "missing"),
        (("-o", "."), 1, "cannot write"),
        (("-o", ""), 1, "cannot write"),
        (("-o", "a" * 244), 1, "File name too long"),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, tuple) else None,
)
def test_wrong_options(command, tiny: Path, tmp_path: Path, monkeypatch, options, code: int, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    output = () if "-o" in options else ("-o", "fit")
    result = command("calibrate", tiny, *OPTIONS, "--samples", "3", *options, *output)
    assert result.code == code, result.err
    assert len(result.err.splitlines()) == 1
    assert message in result.err
    assert [path.name for path in tmp_path.iterdir()] == []


def test_a_partial_file_whose_name_is_taken(command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "fit.partial").mkdir()
    result = command("calibrate", tiny, *OPTIONS, "--samples", "2", "-o", tmp_path / "fit")
    assert result.code == 1
    assert "fit.partial': it is a folder" in result.err
    assert [path.name for path in tmp_path.iterdir()] == ["fit.partial"]


def test_wrong_use(command, tiny: Path, fitted: Path, tmp_path: Path) -> None:
    generate = ["generate", "a t", "-m", tiny, "--dtype", "float32", "--projections"]
    for options, code, message in [
        ([fitted, "--ratio", "1/2"], 2, "says which layers are skipped"),
        ([fitted, "--layers", "last"], 2, "says which layers are skipped"),
        ([fitted, "--dense"], 2, "--dense"),
        ([tmp_path / "nothing"], 1, "nothing"),
        ([tiny], 1, RECORD),
    ]:
        result = command(*generate, *options)
        assert result.code == code, result.err
        assert len(result.err.splitlines()) == 1
        assert message in result.err
    result = command("bench", "-m", tiny, "--projections", fitted, "--ratios", "1/2")
    assert result.code == 2
    assert command("calibrate", tiny).code == 2
    result = command("generate", "a t", "-m", fitted)
    assert result.code == 1
    assert "--projections" in result.err
