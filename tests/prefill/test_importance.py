"""Scores, their standard errors, and the file that holds them."""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import pytest

import stageprune as sp
from stageprune.prefill.importance import Drift, Estimate, Importance, SampleScore


def sample(index: int) -> SampleScore:
    values = [0.1 * index + 0.3, -0.2 * index, 1 / (index + 3)]
    drift = Drift((1.0,), (1.0 / (index + 1),), (0.5,), (0.9,))
    return SampleScore(index, 7, 5, 3.25, (*values[:2], 0.0), tuple(values), drift)


@pytest.fixture
def importance() -> Importance:
    return Importance({"name": "tiny"}, {"seed": 0}, tuple(map(sample, range(5))))


def test_scores_are_means_of_squares_with_standard_errors(importance: Importance) -> None:
    for stage in ("prefill", "decode"):
        for layer in range(3):
            gradients = [getattr(each, stage)[layer] for each in importance.samples]
            squares = [value**2 for value in gradients]
            for ours, values in (
                (importance.scores(stage)[layer], squares),
                (importance.gradients(stage)[layer], gradients),
            ):
                assert ours.mean == pytest.approx(statistics.mean(values), rel=1e-12)
                assert ours.standard_error == pytest.approx(statistics.stdev(values) / math.sqrt(5), rel=1e-12)
    assert importance.scores("prefill")[2] == Estimate(0.0, 0.0)
    assert importance.drift_layers == range(2, 3)


def test_one_sample_has_no_standard_error() -> None:
    assert Estimate.of([2.0]) == Estimate(2.0, None)
    assert Estimate.of([2.0]).sigmas == 0


def test_the_file_holds_everything(importance: Importance, tmp_path: Path) -> None:
    importance.save(tmp_path / "i.json")
    again = sp.Importance.load(tmp_path / "i.json")
    assert again == importance
    again.save(tmp_path / "j.json")
    assert (tmp_path / "i.json").read_bytes() == (tmp_path / "j.json").read_bytes()
    data = json.loads((tmp_path / "i.json").read_text())
    assert (data["kind"], data["version"]) == ("stageprune-importance", 1)
    assert data == importance.to_dict()
    layer = data["layers"][1]["decode"]
    assert layer["importance"] == importance.scores("decode")[1].mean
    assert layer["mean_gradient_standard_error"] == importance.gradients("decode")[1].standard_error


def test_every_truncated_or_altered_file_is_refused(importance: Importance, tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    importance.save(path)
    content = path.read_bytes()
    assert len(content) > 2000
    for length in range(0, len(content) - 2, 97):
        path.write_bytes(content[:length])
        with pytest.raises(sp.ResultFileError, match=r"i\.json"):
            Importance.load(path)
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    for place in digits[::23]:
        other = b"7" if content[place : place + 1] != b"7" else b"6"
        path.write_bytes(content[:place] + other + content[place + 1 :])
        with pytest.raises(sp.ResultFileError, match=r"i\.json"):
            Importance.load(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2]", "no stageprune-importance file"),
        ('{"kind": "recipe"}', "'recipe'"),
        ('{"kind": "stageprune-importance", "version": 2}', "version 2; this stageprune reads version 1"),
        ('{"kind": "stageprune-importance", "version": 1, "samples": []}', "damaged"),
        ("", "damaged or no JSON"),
        ("[" * 100_000, "damaged or no JSON"),
        (b"\xff\xfe\x00", "damaged or no JSON"),
        (None, "No such file"),
    ],
    ids=["list", "kind", "version", "checksum", "empty", "deep", "binary", "missing"],
)
def test_other_files_are_refused_with_the_reason(content: str | bytes | None, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "i.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(sp.ResultFileError, match=reason):
        Importance.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data["samples"].clear(),
        lambda data: data["samples"][0].pop("loss"),
        lambda data: data["samples"][0]["prefill"].append(1.0),
        lambda data: data["samples"][0].update(decode="x"),
        lambda data: data["samples"][0]["decode"].__setitem__(0, None),
        lambda data: data["samples"][1]["drift"].pop("keys"),
        lambda data: data.pop("settings"),
    ],
    ids=["no-samples", "no-loss", "layers", "text", "null", "no-keys", "no-settings"],
)
def test_a_sealed_file_with_other_content_is_refused(change, importance: Importance, tmp_path: Path) -> None:
    from stageprune.records import write_record

    data = importance.to_dict()
    change(data)
    content = {key: value for key, value in data.items() if key not in ("kind", "version", "checksum")}
    write_record(tmp_path / "i.json", "stageprune-importance", 1, content)
    with pytest.raises(sp.ResultFileError, match="no complete"):
        Importance.load(tmp_path / "i.json")
