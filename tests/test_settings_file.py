"""`stageprune.json`: round trips, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import stageprune as sp
from stageprune.evaluate.fingerprint import identity
from stageprune.files import remove_leftovers, write_file
from stageprune.records import write_record
from zoo import BY_NAME

METHODS = (sp.PrefillOnlyPruning(layers="importance", importance=[0.5, 1e-300, 0]), sp.OnlineChannelPruning(0.3))


@settings(suppress_health_check=[*settings().suppress_health_check, HealthCheck.function_scoped_fixture])
@given(
    ratio=st.floats(0, 1, exclude_max=True),
    scores=st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1),
    contiguous=st.booleans(),
)
def test_what_was_saved_is_loaded(tmp_path: Path, ratio, scores, contiguous) -> None:
    first = sp.PrefillOnlyPruning(ratio, "importance", importance=scores, contiguous=contiguous)
    for methods in ((first,), (first, METHODS[1]), ()):
        sp.save_settings(tmp_path / "s.json", *methods)
        assert sp.load_settings(tmp_path / "s.json") == methods
        assert [path.name for path in tmp_path.iterdir()] == ["s.json"]


def test_no_method_is_no_setting(tmp_path: Path) -> None:
    with pytest.raises(sp.SettingError, match="got dict"):
        sp.save_settings(tmp_path / "s.json", {"ratio": 0.5})  # type: ignore[arg-type]
    with pytest.raises(sp.SettingError, match="once"):
        sp.save_settings(tmp_path / "s.json", METHODS[0], METHODS[0])
    assert list(tmp_path.iterdir()) == []


def test_every_truncated_or_altered_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    sp.save_settings(path, *METHODS, model=BY_NAME["llama"].build())
    content = path.read_bytes()
    for length in range(0, len(content) - 2, 13):
        path.write_bytes(content[:length])
        with pytest.raises(sp.ResultFileError, match=r"s\.json"):
            sp.load_settings(path)
    for place in (place for place, byte in enumerate(content) if chr(byte).isdigit()):
        other = b"7" if content[place : place + 1] != b"7" else b"6"
        path.write_bytes(content[:place] + other + content[place + 1 :])
        with pytest.raises(sp.ResultFileError, match=r"s\.json"):
            sp.load_settings(path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("[1, 2]", "no stageprune-settings file"),
        ('{"kind": "stageprune-importance"}', "'stageprune-importance'"),
        ('{"kind": "stageprune-settings", "version": 2}', "version 2; this stageprune reads version 1"),
        ('{"kind": "stageprune-settings", "version": 1, "methods": []}', "damaged"),
        ("", "damaged or no JSON"),
        (None, "No such file"),
    ],
    ids=["list", "kind", "version", "checksum", "empty", "missing"],
)
def test_other_files_are_refused_with_the_reason(content: str | None, reason: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "s.json").write_text(content)
    with pytest.raises(sp.ResultFileError, match=reason):
        sp.load_settings(tmp_path / "s.json")


RIGHT = sp.PrefillOnlyPruning().to_dict()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"methods": {}}, "dict"),
        ({"methods": ["last"]}, "'last'"),
        ({"methods": [{"method": "magic"}]}, "no method 'magic'"),
        ({"methods": [{**RIGHT, "ratio": 33}]}, "ratio"),
        ({"methods": [{**RIGHT, "depth": 3}]}, "depth"),
        ({"methods": [RIGHT, RIGHT]}, "twice"),
        ({"model": "llama"}, "'llama'"),
        ({"plan": 3}, "int 3"),
    ],
    ids=["mapping", "text", "unknown", "ratio", "key", "twice", "model", "plan"],
)
def test_a_sealed_file_with_other_content_is_refused(content: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write_record(
        tmp_path / "s.json", "stageprune-settings", 1, {"methods": [RIGHT], "model": None, "plan": None, **content}
    )
    with pytest.raises(sp.ResultFileError, match=f"no complete.*{reason}"):
        sp.load_settings(tmp_path / "s.json")


def test_only_the_model_it_was_made_for(tmp_path: Path) -> None:
    path, llama = tmp_path / "s.json", BY_NAME["llama"].build
    sp.save_settings(path, METHODS[1], model=llama(torch.float32))
    assert sp.load_settings(path, llama(torch.float32)) == METHODS[1:]
    assert sp.load_settings(path, llama(torch.float32).to(torch.bfloat16)) == METHODS[1:], "in another dtype, too"
    with pytest.raises(sp.ResultFileError, match=r"s\.json' is of another model \(the weights differ\)"):
        sp.load_settings(path, llama(torch.float32, seed=1))
    with pytest.raises(sp.ResultFileError, match="architecture: 'LlamaForCausalLM' there, 'Qwen3ForCausalLM' here"):
        sp.load_settings(path, BY_NAME["qwen3"].build(torch.float32))
    sp.save_settings(path, METHODS[1])
    assert sp.load_settings(path, BY_NAME["qwen3"].build(torch.float32)) == METHODS[1:]


def test_one_changed_weight_matrix_is_another_model() -> None:
    model = BY_NAME["llama"].build()
    before = identity(model)
    with torch.no_grad():
        model.model.layers[3].mlp.up_proj.weight.mul_(1.01)
    assert identity(model)["weights"] != before["weights"]


def test_leftovers_of_killed_writers_are_removed(tmp_path: Path) -> None:
    others = [".s.json.short", ".t.json.abcd1234", "s.json", ".s.json.abcd12345", ".s.json.ABCD1234"]
    for name in (".s.json.abcd1234", ".s.json._x_7777_", *others):
        write_file(tmp_path / name, "x")
    remove_leftovers(tmp_path / "s.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(others)
