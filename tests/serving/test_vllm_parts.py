"""The parts of the plugin that need no vLLM: rows, settings, keys, the command line, and the range of versions."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

import stageprune as sp
from stageprune.cli.app import run
from stageprune.errors import ResultFileError, ServingError, SettingError
from stageprune.serving.vllm import compat
from stageprune.serving.vllm.check import Checked, require
from stageprune.serving.vllm.command import family_of, requested, vllm_command
from stageprune.serving.vllm.keys import KEY, block_key
from stageprune.serving.vllm.rows import split_rows
from stageprune.serving.vllm.settings import EngineSettings, engine_settings
from stageprune.settings_file import save_settings, settings_beside

REQUESTS = st.lists(
    st.tuples(st.integers(1, 9), st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6
)  # scheduled, computed, prompt


@given(REQUESTS, st.booleans())
def test_rows_are_told_apart_by_position(requests: list[tuple[int, int, int]], all_context: bool) -> None:
    """Against one row after the other."""
    stages, owners = [], []
    for number, (scheduled, computed, prompt) in enumerate(requests):
        for position in range(computed, computed + scheduled):
            stages.append(position < prompt - (0 if all_context else 1))
            owners.append(number)
    rows = split_rows(*(np.array(part) for part in zip(*requests, strict=True)), all_context)
    if rows is None:
        assert not any(stages)
        return
    assert rows.context.tolist() == [row for row, context in enumerate(stages) if context]
    assert rows.decode.tolist() == [row for row, context in enumerate(stages) if not context]
    counts = [sum(owners[row] == number for row in rows.decode) for number in range(len(requests))]
    assert rows.requests.tolist() == [number for number, count in enumerate(counts) if count]
    assert np.diff(rows.starts).tolist() == [count for count in counts if count]
    assert rows.longest == max(counts)


def test_a_resumed_request_is_split_where_it_was() -> None:
    """A prompt of 5 and 3 generated tokens, computed again at once: four rows of context, four that decode."""
    rows = split_rows([8], [0], [5])
    assert rows is not None
    assert rows.context.tolist() == [0, 1, 2, 3]
    assert rows.decode.tolist() == [4, 5, 6, 7]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 6))
def test_blocks_have_equal_keys_exactly_if_their_tokens_had_equal_stages(first: int, other: int, block: int) -> None:
    settings = EngineSettings((1,), fingerprint="f")
    end = block * 8

    def stages(prompt: int) -> list[bool]:
        return [position < prompt - 1 for position in range(end)]  # keys are chained, so all before the end count

    same = block_key(settings, first, end) == block_key(settings, other, end)
    assert same == (stages(first) == stages(other))


def test_keys_of_other_settings_and_roles_differ() -> None:
    settings = EngineSettings((1,), fingerprint="f")
    assert block_key(settings, 100, 32) == (KEY, "f")
    assert block_key(EngineSettings((1,), fingerprint="g"), 100, 32) == (KEY, "g")
    assert block_key(settings, 30, 32) == (KEY, "f:29")
    assert block_key(EngineSettings((1,), role="prefill", fingerprint="f"), 30, 32) == (KEY, "f:29:prefill")
    assert block_key(EngineSettings((1,), prefix_cache="shared", fingerprint="f"), 30, 32) == (KEY, "f")


def test_settings() -> None:
    found = engine_settings({"ratio": 0.34}, 30)
    assert found is not None
    assert found.layers == tuple(range(20, 30))
    assert (found.prefix_cache, found.role, found.projections) == ("exact", "both", None)
    assert EngineSettings.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert engine_settings({"layers": list(range(20, 30))}, 30) == found
    assert engine_settings({"ratio": 0.34, "role": "prefill"}, 30).fingerprint == found.fingerprint  # type: ignore[union-attr]
    assert engine_settings({"ratio": 0.34, "prefix_cache": "shared"}, 30).fingerprint != found.fingerprint  # type: ignore[union-attr]
    assert engine_settings({"ratio": 0}, 30) is None
    assert engine_settings(False, 30) is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (True, "must be an object"),
        ({"ratio": 33}, "0 <= ratio < 1"),
        ({"ratio": 0.3, "rate": 1}, "unknown setting 'rate' .* known: .*projections.*prefix_cache, role, settings"),
        ({"settings": ""}, "must name a file"),
        ({"projections": ""}, "must name a file or folder"),
        ({"layers": "importance", "importance": [10**400] * 30}, "finite"),
        ({"layers": [30]}, "does not exist"),
        ({"boundary": False}, "ablation"),
        ({"kv_projection": False}, "ablation"),
        ({"ratio": 0.3, "role": "decode"}, "role must be one of"),
        ({"ratio": 0.3, "prefix_cache": True}, "prefix_cache must be one of"),
        ({"layers": [3], "role": "prefill"}, "needs the last layers"),
        ({"ratio": 0, "role": "prefill"}, "no layer is skipped"),
        ({"settings": "a.json", "ratio": 0.3}, "cannot apply"),
    ],
)
def test_bad_settings(bad: Any, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        engine_settings(bad, 30)


def test_settings_file(tmp_path: Path) -> None:
    for nowhere in (str(tmp_path), "~nosuchuser/x", "x" * 5000):
        assert settings_beside(nowhere) is None
    save_settings(tmp_path / "stageprune.json", sp.PrefillOnlyPruning(layers=[4, 5]))
    beside = {"settings": str(settings_beside(str(tmp_path)))}
    assert engine_settings(beside, 6) == engine_settings({"layers": [4, 5]}, 6)
    save_settings(tmp_path / "stageprune.json", sp.OnlineChannelPruning(ratio=0.3))
    with pytest.raises(SettingError, match="prefill-only pruning alone"):
        engine_settings(beside, 6)
    (tmp_path / "stageprune.json").unlink()
    (tmp_path / "stageprune.json").mkdir()
    with pytest.raises(ResultFileError, match="cannot read"):
        engine_settings({"settings": str(settings_beside(str(tmp_path)))}, 6)
    (tmp_path / "stageprune.json").rmdir()
    (tmp_path / "stageprune.json").write_text("{")
    with pytest.raises(ResultFileError, match="damaged"):
        engine_settings(beside, 6)


def test_command() -> None:
    override = requested([sp.PrefillOnlyPruning(ratio=0.25)], role=None, prefix_cache="shared")
    assert override == {"ratio": 0.25, "layers": "last", "prefix_cache": "shared"}
    assert requested([sp.PrefillOnlyPruning(layers=[2, 3])]) == {"layers": (2, 3)}
    assert requested(()) is False
    with pytest.raises(SettingError, match="prefill-only pruning alone"):
        requested([sp.PrefillOnlyPruning(), sp.OnlineChannelPruning(ratio=0.3)])
    command = vllm_command("folder", "name", override, {"port": 8000, "dtype": None}, ["--seed", "1"])
    assert json.loads(option(command, "hf-overrides")) == {"stageprune": override}
    assert command[-3:] == ["--port=8000", "--seed", "1"]
    assert option(command, "dtype") == ""
    assert option(vllm_command("folder", "-x", override, {}, []), "served-model-name") == "-x"
    for other in ("--hf-overrides={}", "--hf_overrides", "--hf-over", "--hf-overrides.stageprune=1"):
        with pytest.raises(ServingError, match="give those here"):
            vllm_command("folder", "name", override, {}, [other])


def option(command: list[str], name: str) -> str:
    """The value of `--name=value`."""
    return next((word.partition("=")[2] for word in command if word.startswith(f"--{name}=")), "")


def test_what_the_command_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The file beside the checkpoint, unless an option or --dense says otherwise."""
    started: list[list[str]] = []

    class Started(BaseException):
        pass

    def execve(path: str, command: list[str], environment: Any) -> None:
        started.append(command)
        raise Started

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(compat, "version", lambda: "0.32.0")
    LlamaConfig(num_hidden_layers=6, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    save_settings(tmp_path / "stageprune.json", sp.PrefillOnlyPruning(layers=[4, 5]))
    base = ["serve", str(tmp_path), "--engine", "vllm", "--no-check", "--port", "0"]
    for others, override in [
        ([], {"layers": [4, 5]}),
        (["--ratio", "0.5", "--role", "prefill"], {"layers": "last", "ratio": 0.5, "role": "prefill"}),
        (["--dense"], False),
    ]:
        with pytest.raises(Started):
            run([*base, *others])
        assert json.loads(option(started[-1], "hf-overrides")) == {"stageprune": override}
    assert "following" in capsys.readouterr().err
    with pytest.raises(Started):
        run([*base, "--ratio", "0"])
    assert "skip none of 6 layers: nothing is pruned" in capsys.readouterr().err
    monkeypatch.setattr(compat, "version", lambda: "0.99.0")
    with pytest.raises(Started):
        run([*base, "--dense"])


def test_what_keeps_vllm_from_being_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compat, "version", lambda: "0.32.0")
    LlamaConfig(num_hidden_layers=6, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert run(["serve", str(tmp_path), "--engine", "vllm", "--no-check", "--port", port]) == 1
    assert f"cannot listen on '127.0.0.1', port {port}" in capsys.readouterr().err
    (tmp_path / "stageprune.json").symlink_to(tmp_path / "nowhere")
    for engine in ("vllm", "transformers"):
        assert run(["serve", str(tmp_path), "--engine", engine, "--port", "0"]) == 1
        assert "cannot read" in capsys.readouterr().err
    assert run(["serve", "~nosuchuser/x", "--engine", "vllm", "--no-check", "--port", "0"]) == 1
    assert "nosuchuser" in capsys.readouterr().err


def test_families() -> None:
    class Config:
        architectures = ("Qwen3ForCausalLM",)

    assert family_of(Config) == "Qwen3"
    Config.architectures = ("MixtralForCausalLM",)
    with pytest.raises(ServingError, match="MixtralForCausalLM cannot be pruned in vLLM; supported: LlamaForCausalLM"):
        family_of(Config)


def test_versions() -> None:
    for tested in compat.TESTED:
        compat.check_version(f"{tested}.7")
    for other in ("0.30.0", "0.99.0", "1.0"):
        with pytest.raises(compat.EngineError, match=rf"was tested with vLLM .*, and vLLM {other} is installed"):
            compat.check_version(other)


def test_what_the_check_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "version", lambda: "0.32.0")
    exact = Checked("Llama", "float32", 240, 240, 1e-6)
    require([exact, Checked("Qwen2", "bfloat16", 240, 230, 0.1)])
    for wrong in (
        Checked("Llama", "float32", 240, 239, 1e-6),
        Checked("Llama", "float32", 240, 240, 0.1),
        Checked("Llama", "bfloat16", 240, 200, 0.01),
        Checked("Llama", problem="gone"),
        Checked("Llama"),
    ):
        with pytest.raises(compat.EngineError, match="does not answer as the library does"):
            require([exact, wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--role", "prefill"], "--role is for --engine vllm"),
        (["demo", "--no-check"], "--check/--no-check is for --engine vllm"),
        (["demo", "--engine", "vllm", "--max-queue", "3"], "--max-queue is for --engine transformers"),
        (["demo", "--engine", "vllm", "--dense", "--role", "prefill"], "--role says how a pruned model is served"),
        (["demo", "--", "--seed", "1"], "unexpected argument '--seed'"),
    ],
)
def test_options_of_the_other_engine(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_another_version_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(compat, "version", lambda: "0.99.1")
    assert run(["serve", "demo", "--engine", "vllm"]) == 1
    error = capsys.readouterr().err
    assert "error: this stageprune was tested with vLLM" in error
    assert "Traceback" not in error
