"""Peers: turns with the dense model, processes of their own, and what is said where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from helpers import tokens
from stageprune.evaluate.grid import Grid
from stageprune.evaluate.peers.base import PeerError, Times, closing, peer_speed
from stageprune.evaluate.peers.choose import open_peer
from stageprune.evaluate.peers.compiled import Compiled
from stageprune.evaluate.peers.process import ProcessPeer
from stageprune.evaluate.peers.run import run_peers
from zoo import BY_NAME

OPTIONS = {"context": 64, "threads": 1, "gpu": False, "dtype": "float32"}

LLAMA = """
class Llama:
    metadata = {"general.file_type": "7"}
    def __init__(self, model_path, **options):
        print("a library's own line")
        if "missing" in model_path:
            raise ValueError("Model path\\ndoes not exist")
        assert options["n_ctx"] == 64 and options["n_threads"] == 1 and options["n_gpu_layers"] == 0
        self.asked = False
    def reset(self):
        self.asked = True
    def generate(self, tokens, temp):
        assert temp == 0 and self.asked and tokens[0] > 0
        self.asked = False
        while True:
            yield 1
"""
VLLM = """
class SamplingParams:
    def __init__(self, **options):
        self.options = options
class LLM:
    def __init__(self, model, dtype, max_model_len, enable_prefix_caching, **options):
        assert (model, dtype, max_model_len, enable_prefix_caching) == ("folder", "float32", 64, False)
    def generate(self, prompts, parameters, use_tqdm):
        assert parameters.options["ignore_eos"] and parameters.options["temperature"] == 0
        assert all(len(prompt["prompt_token_ids"]) == 5 for prompt in prompts)
"""


@pytest.fixture
def fakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for both libraries, for this process and for those it starts."""
    (tmp_path / "llama_cpp.py").write_text(LLAMA)
    (tmp_path / "vllm.py").write_text(VLLM)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", ":".join([str(tmp_path), *filter(None, sys.path)]))


@pytest.fixture(scope="module")
def model():
    return BY_NAME["llama"].build(torch.float32, "sdpa")


class Fake:
    name, precision, version = "fake", "float8", "1"
    closed = False

    def answer(self, input_ids: torch.Tensor, new_tokens: int) -> Times:
        if input_ids.shape[1] > 10:
            raise PeerError("too long")
        return Times(1.0, 4.0)

    def close(self) -> None:
        self.closed = True


def test_turns_with_the_dense_model(model) -> None:
    turns = []
    speed = peer_speed(model, Fake(), tokens(2, 8), 3, pairs=2, on_turn=lambda: turns.append(1))
    assert len(turns) == 2 + 2 * speed.pairs == 6, "one of each does not count"
    assert (speed.batch, speed.prompt_length, speed.new_tokens) == (2, 8, 3)
    assert speed.first_s.median == 1
    assert speed.tokens_per_s == 2 * 3 / 4
    data = speed.to_dict()
    assert data["precision"] == "float8"
    assert data["total_s"]["median"] == 4
    assert data["first_speedup"]["count"] == 2


def test_a_compiled_model_answers_as_the_dense_one_and_leaves_it_alone(model, monkeypatch) -> None:
    seen = []
    compile_ = torch.compile
    monkeypatch.setattr("torch.compile", lambda *args, **options: seen.append(options) or compile_(*args, **options))
    before = dict(vars(model))
    with closing(Compiled(model, backend="eager")) as peer:
        for _ in range(2):
            times = peer.answer(tokens(1, 9), 3)
            assert 0 < times.first_s <= times.total_s
    assert len(seen) == 1, "once for equal shapes"
    assert seen[0]["backend"] == "eager"
    assert set(vars(model)) == set(before)
    assert peer.precision == "float32"


def test_compile_needs_a_compiler(model, monkeypatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(PeerError, match="C\\+\\+ compiler"):
        open_peer("compile", model, "demo", 64)


def test_a_process_answers(fakes: None) -> None:
    with closing(ProcessPeer("llama.cpp", ("llama_cpp", "llama-cpp-python"), "m.gguf", OPTIONS)) as peer:
        assert peer.precision == "GGUF Q8_0"
        times = peer.answer(torch.ones(1, 5, dtype=torch.long), 3)
        assert 0 < times.first_s <= times.total_s
        with pytest.raises(PeerError, match="one prompt at a time"):
            peer.answer(torch.ones(2, 5, dtype=torch.long), 3)
    with closing(ProcessPeer("vllm", ("vllm", "vllm"), "folder", OPTIONS)) as peer:
        assert peer.precision == "float32"
        assert peer.answer(torch.ones(2, 5, dtype=torch.long), 3).total_s > 0
        peer._process.kill()
        peer._process.wait()
        with pytest.raises(PeerError, match="vllm"):
            peer.answer(torch.ones(2, 5, dtype=torch.long), 3)


def test_a_process_that_cannot_load_says_why(fakes: None) -> None:
    with pytest.raises(PeerError, match=r"llama\.cpp: ValueError: Model path does not exist"):
        ProcessPeer("llama.cpp", ("llama_cpp", "llama-cpp-python"), "missing", OPTIONS)


def test_what_is_missing_is_said_and_the_others_go_on(model, monkeypatch, demo) -> None:
    fake = Fake()
    real = open_peer
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr(
        "stageprune.evaluate.peers.run.open_peer",
        lambda name, *args: fake if name == "compile" else real(name, *args),
    )
    small = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32, name_or_path="x")
    monkeypatch.setattr("stageprune.evaluate.peers.base.timed_generate", lambda *_, **__: Answer())
    grid = Grid((8, 12), batches=(1,), new_tokens=3, pairs=1)
    found = list(run_peers(("vllm", "llama.cpp", "compile"), small, demo.tokenizer, "a-folder", grid))
    assert [(result.peer, len(result.cells)) for result in found] == [("vllm", 0), ("llama.cpp", 0), ("compile", 1)]
    assert found[0].missing == "vllm is not installed; run: pip install vllm"
    assert "GGUF" in str(found[1].missing)
    assert found[2].missing == "too long"
    assert fake.closed
    assert found[2].to_dict()["cells"][0]["first_speedup"]["median"] == 2


class Answer:
    first_token_s, total_s = 2.0, 8.0
