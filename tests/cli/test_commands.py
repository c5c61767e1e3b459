"""What each command prints and writes, on a tiny model."""

from __future__ import annotations

import csv
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import stageprune as sp
from stageprune.cli import common
from stageprune.evaluate.text import prompt_of

SHORT = ("--max-new-tokens", "6")


def answer(
    folder: Path, text: str, methods: sp.PrefillOnlyPruning | tuple[Any, ...] | None, **options: Any
) -> tuple[list[int], list[int]]:
    """Prompt and answer as a user of the library gets them."""
    loaded = sp.load(str(folder))
    text = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    ids = torch.tensor([loaded.tokenizer(text, add_special_tokens=False).input_ids])
    if methods is not None:
        sp.prune(loaded.model, *(methods if isinstance(methods, tuple) else (methods,)))
    new = loaded.model.generate(ids, max_new_tokens=6, **{"do_sample": False, **options})[0, ids.shape[1] :]
    return ids[0].tolist(), new.tolist()


@pytest.mark.parametrize(
    ("options", "method"),
    [
        (("--ratio", "1/2"), sp.PrefillOnlyPruning(0.5)),
        (("--layers", "0"), sp.PrefillOnlyPruning(layers=[0])),
        (("--ratio", "0.5", "--layers", "first"), sp.PrefillOnlyPruning(0.5, "first")),
        (("--dense",), None),
    ],
)
def test_generate_answers_as_the_library_does(command, tiny: Path, options, method) -> None:
    result = command("generate", "a b c d e f", "--model", tiny, *SHORT, *options, "--json")
    assert result.code == 0, result.err
    data = json.loads(result.out)
    prompt, expected = answer(tiny, "a b c d e f", method)
    assert data["prompt_tokens"] == len(prompt)
    assert data["new_tokens"] == expected
    assert (data["report"] is None) == (method is None)
    if method is not None:
        assert data["report"]["skipped_layers"] == ([1] if method.layers == "last" else [0])
    assert data["first_token_s"] > 0


def test_generate_samples_reproducibly(command, tiny: Path) -> None:
    options = ("--temperature", "1.5", "--top-p", "0.9", "--json", *SHORT)
    first, again, other = (
        json.loads(command("generate", "a b c", "--model", tiny, *options, "--seed", seed).out)["new_tokens"]
        for seed in (3, 3, 4)
    )
    assert first == again != other


def test_generate_streams_the_answer_alone(command, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("a t a t")
    arguments = ("--model", tiny, *SHORT, "--no-chat")
    text = json.loads(command("generate", "a t a t", *arguments, "--json").out)["text"]
    plain = command("generate", "--file", tmp_path / "prompt.txt", *arguments)
    assert plain.out == text + "\n"
    assert "first token after" in plain.err
    piped = subprocess.run(
        [sys.executable, "-m", "stageprune", "generate", *map(str, arguments)],
        input="a t a t",
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"COLUMNS": "200"},
    )
    assert piped.returncode == 0, piped.stderr
    assert piped.stdout == plain.out
    assert len(piped.stderr.splitlines()) == 1, "the line with the times, and no library's advice"


def test_compare_reports_both_sides(command, tiny: Path) -> None:
    arguments = ("compare", "a b c d", "--model", tiny, "--ratio", "1/2", *SHORT, "--repeats", "2", "--dtype", "auto")
    data = json.loads(command(*arguments, "--json").out)
    assert data["prefill"]["speedup"]["count"] == 2
    assert data["prefill"]["ideal_speedup"] == data["report"]["ideal_speedup"] > 1
    assert data["dense_tokens"] == answer(tiny, "a b c d", None)[1]
    assert data["pruned_tokens"] == answer(tiny, "a b c d", sp.PrefillOnlyPruning(0.5))[1]
    assert data["decode"]["speedup"]["count"] == 2
    equal = [a == b for a, b in zip(data["dense_tokens"], data["pruned_tokens"], strict=True)]
    assert data["equal_share"] == sum(equal) / len(equal)
    text = command(*arguments)
    assert text.code == 0
    for part in ("first token", "ideal", "GFLOP", "tokens/s", f"{data['prefill']['ideal_speedup']:.2f}x"):
        assert part in text.out


def test_compare_has_a_prompt_of_its_own(command, tiny: Path) -> None:
    result = command("compare", "--model", tiny, "--length", "200", *SHORT, "--repeats", "1", "--json")
    assert json.loads(result.out)["prompt_tokens"] == 200


@pytest.fixture(scope="module")
def grid(tiny: Path) -> tuple[str, ...]:
    return ("bench", "--model", str(tiny), "--lengths", "8,16", "--ratios", "0,1/2", "--repeats", "2", "--seconds", "0")


def test_bench_writes_the_same_numbers_everywhere(command, tiny: Path, grid, tmp_path: Path) -> None:
    result = command(*grid, "--json", tmp_path / "b.json", "--csv", tmp_path / "b.csv", "--dtype", "float32")
    assert result.code == 0, result.err
    data = json.loads((tmp_path / "b.json").read_text())
    with (tmp_path / "b.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(cell["ratio"], cell["prompt_length"]) for cell in data["cells"]] == [(0, 8), (0, 16), (0.5, 8), (0.5, 16)]
    for row, cell in zip(rows, data["cells"], strict=True):
        assert float(row["prefill.speedup.median"]) == cell["prefill"]["speedup"]["median"] > 0
        assert int(row["memory.dense_bytes"]) == cell["memory"]["dense_bytes"] >= cell["memory"]["pruned_bytes"] > 0
        assert cell["decode"] is None
        assert f"{cell['prefill']['ideal_speedup']:.2f}x" in result.out
    loaded = sp.load(str(tiny))
    with sp.prune(loaded.model, sp.PrefillOnlyPruning(0.5)) as handle:
        assert data["cells"][3]["prefill"]["ideal_speedup"] == handle.report(16).ideal_speedup
    assert data["cells"][0]["prefill"]["ideal_speedup"] == 1
    assert {"torch", "transformers", "cpu", "threads"} <= data["system"].keys()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b.csv", "b.json"]


def test_generate_with_channels_answers_as_the_library_does(command, tiny: Path) -> None:
    both = (sp.PrefillOnlyPruning(0.5), sp.OnlineChannelPruning(0.4, partition_fraction=0.2, selection="full"))
    alone = ("--channel-ratio", "0.4", "--partition-fraction", "0.2", "--selection", "full")
    for options, methods in [
        (alone, both[1:]),
        ((*alone, "--ratio", "1/2"), both),
        (("--channel-preset", "fast", "--channel-backend", "masked"), None),
    ]:
        result = command("generate", "a b c d e f", "--model", tiny, *SHORT, *options, "--json")
        assert result.code == 0, result.err
        data = json.loads(result.out)
        if methods is None:
            methods = (replace(sp.OnlineChannelPruning.preset("fast"), backend="masked"),)
        assert data["new_tokens"] == answer(tiny, "a b c d e f", methods)[1]
        assert len(data["report"]["channels"]) == 2
        assert len(data["report"]["methods"]) == len(methods)
    shown = command("generate", "a b c", "--model", tiny, *SHORT, "--channel-ratio", "0.4")
    assert "of the weights of 2 of 2 FFNs" in shown.err


def test_every_channel_setting_can_be_given(command, tiny: Path) -> None:
    alone = ("generate", "a b c", "--model", tiny, *SHORT, "--channel-ratio", "0.4", "--json")
    others = (
        "--channel-setting",
        "scope=sequence",
        "--channel-setting",
        "refresh=2",
        "--channel-setting",
        "protect=[1]",
    )
    settings = json.loads(command(*alone, *others).out)["report"]["methods"][0]
    assert (settings["scope"], settings["refresh"], settings["protect"]) == ("sequence", 2, [1])


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("scope", "takes NAME=VALUE"),
        ("scope=", "takes NAME=VALUE"),
        ("nothing=1", "no such setting; known: mlp_ratio"),
        ("ratio=0.2", "--channel-ratio says that"),
        ("refresh=0", "refresh must be an integer of at least 1"),
        ("unseen=never", "unseen must be one of"),
    ],
    ids=["no-value", "empty", "unknown", "own-option", "wrong", "wrong-word"],
)
def test_wrong_channel_settings(command, tiny: Path, text: str, says: str) -> None:
    shown = command("generate", "a b c", "--model", tiny, "--channel-setting", text)
    assert shown.code == 2
    assert says in " ".join(shown.err.split())


def test_compare_with_channels_shows_and_draws_them(command, tiny: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="plots need the extra [plots]")
    picture = tmp_path / "channels.svg"
    arguments = ("compare", "a b c d", "--model", tiny, "--channel-ratio", "0.5", *SHORT, "--repeats", "2")
    result = command(*arguments, "--plot", picture)
    assert result.code == 0, result.err
    assert picture.read_text().startswith("<?xml")
    assert "uses all layers" in result.out
    assert "by bytes read" in result.out
    data = json.loads(command(*arguments, "--json").out)
    assert data["decode"]["ideal_speedup"] > 1
    assert data["decode"]["preparation_steps"] > 0
    assert data["report"]["channels"][0]["observed"]["tokens"] == 6
    assert sorted(path.name for path in tmp_path.iterdir()) == ["channels.svg"]


def test_bench_decode_with_channels(command, tiny: Path) -> None:
    arguments = ("bench", "--model", tiny, "--lengths", "16", "--repeats", "2", "--seconds", "0", "--what", "decode")
    data = json.loads(command(*arguments, "--channel-ratio", "0.3,0.5", "--json", "-").out)
    assert [cell["methods"][0]["ratio"] for cell in data["cells"]] == [0.3, 0.5]
    assert all(cell["ratio"] is None and cell["skipped_layers"] == 0 for cell in data["cells"])
    for cell in data["cells"]:
        decode = cell["decode"]
        assert decode["achieved"] == decode["speedup"]["median"] / decode["ideal_speedup"]
        assert cell["ffn_bytes"] < 1
    both = json.loads(command(*arguments, "--channel-preset", "balanced", "--ratios", "1/2", "--json", "-").out)
    assert [method["method"] for method in both["cells"][0]["methods"]] == [
        "prefill-only-pruning",
        "online-channel-pruning",
    ]
    shown = command(*arguments, "--channel-ratio", "0.3")
    assert "break-even" in shown.out


def test_bench_of_single_ffns(command, tmp_path: Path) -> None:
    arguments = ("bench", "--what", "ffn", "--shapes", "32x64,48x96", "--repeats", "2", "--seconds", "0")
    result = command(
        *arguments, "--channel-ratio", "0.3,0.6", "--json", tmp_path / "f.json", "--csv", tmp_path / "f.csv"
    )
    assert result.code == 0, result.err
    cells = json.loads((tmp_path / "f.json").read_text())["cells"]
    assert [(cell["hidden_size"], cell["method"]["mlp_ratio"]) for cell in cells] == [
        (32, 0.3), (32, 0.6), (48, 0.3), (48, 0.6),
    ]  # fmt: skip
    for cell in cells:
        sizes = cell["sizes"]
        read = 2 * (sizes["retained"] + sizes["candidates"]) + sizes["active"]
        assert cell["ideal_speedup"] == 3 * sizes["total"] / read
        assert f"{cell['speedup']['median']:.2f}x" in result.out
    with (tmp_path / "f.csv").open(newline="") as file:
        assert [int(row["hidden_size"]) for row in csv.DictReader(file)] == [32, 32, 48, 48]


def test_bench_records_no_folder_of_the_machine(command, tiny: Path, grid) -> None:
    text = command(*grid, "--json", "-").out
    assert json.loads(text)["model"] == tiny.name
    assert str(tiny.parent) not in text


@pytest.mark.parametrize(("what", "parts"), [("decode", {"decode"}), ("all", {"prefill", "memory", "decode"})])
def test_bench_measures_what_was_asked_for(command, grid, monkeypatch, what: str, parts: set[str]) -> None:
    monkeypatch.setattr("stageprune.cli.bench.DECODE_TOKENS", 3)
    result = command(*grid, "--json", "-", "--what", what, "--ratios", "1/2", "--lengths", "8", "--batch", "1,2")
    cells = json.loads(result.out)["cells"]
    assert [cell["batch"] for cell in cells] == [1, 2]
    for cell in cells:
        assert {name for name in ("prefill", "memory", "decode") if cell[name] is not None} == parts
        assert cell["decode"]["dense_tokens_per_s"]["count"] == cell["pairs"] == 2


def test_bench_overwrites_whole_files_only(command, grid, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "b.json").write_text("before")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    result = command(*grid, "--json", tmp_path / "b.json")
    assert result.code == 1
    assert "No space left" in result.err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"b.json": "before"}


def test_doctor_knows_this_system(command) -> None:
    data = json.loads(command("doctor", "--json").out)
    assert data["system"]["torch"] == torch.__version__
    assert data["system"]["vllm"] is None or isinstance(data["system"]["vllm"], str)
    text = command("doctor").out
    assert torch.__version__ in text
    assert "pruned" not in text


@pytest.mark.parametrize("verify", [(), ("--verify",)], ids=["config", "weights"])
def test_doctor_on_a_checkpoint(command, tiny: Path, verify: tuple[str, ...]) -> None:
    result = command("doctor", tiny, "--ratio", "1/2", "--json", *verify)
    assert result.code == 0
    model = json.loads(result.out)["model"]
    assert model["supported"]
    assert model["verified"] == bool(verify)
    assert model["skipped_layers"] == [1]
    loaded = sp.load(str(tiny))
    assert model["parameters"] == loaded.model.num_parameters()
    with sp.prune(loaded.model, sp.PrefillOnlyPruning(0.5)) as handle:
        assert model["ideal_speedups"] == {"128": handle.report(128).ideal_speedup}
    assert "tiny" not in model["architecture"]
    assert "can be pruned" in command("doctor", tiny, *verify).out


CONFIGS = [
    ({"model_type": "llama", "num_hidden_layers": 9}, None),
    ({"model_type": "qwen3", "num_hidden_layers": 9}, None),
    ({"model_type": "gpt_neox", "num_hidden_layers": 9}, None),
    ({"model_type": "t5"}, "encoder-decoder"),
    ({"model_type": "whisper"}, "encoder-decoder"),
    ({"model_type": "bert"}, "no list of decoder layers"),
    ({"model_type": "unheard_of"}, "unheard_of"),
    ({"model_type": "unheard_of", "auto_map": {"AutoConfig": "own.Config"}}, "code that the model brings along"),
    ({"model_type": "mamba", "num_hidden_layers": 3}, "recurrent|no description|K/V"),
    ({"model_type": "llama", "hidden_size": "wide"}, "configuration|no model can be built"),
]


@pytest.mark.parametrize(
    ("config", "reason"), CONFIGS, ids=[f"{index}-{config['model_type']}" for index, (config, _) in enumerate(CONFIGS)]
)
@pytest.mark.parametrize("file", ["", "config.json"], ids=["folder", "file"])
def test_doctor_on_a_configuration_alone(command, tmp_path: Path, config, reason: str | None, file: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command("doctor", tmp_path / file)
    assert result.code == (0 if reason is None else 1)
    assert "Traceback" not in result.out + result.err
    if reason is None:
        assert "prompts skip 3 of 9 layers (6-8)" in result.out
        assert "ideal speed-up" in result.out
    else:
        assert re.search(reason, result.out + result.err)


def test_doctor_says_what_each_method_can_do(command, tmp_path: Path) -> None:
    config = {"model_type": "gemma3n_text", "num_hidden_layers": 15, "num_kv_shared_layers": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    result = command("doctor", tmp_path, "--lengths", "64", "--channel-ratio", "0.1")
    assert result.code == 0, "one of the two can be used"
    assert "prefill-only pruning: not possible" in result.out
    assert "num_kv_shared_layers" in result.out
    assert "channel pruning: " in result.out
    assert "at 64 (bytes read)" in result.out


def test_doctor_on_images(command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl"}))
    result = command("doctor", tmp_path, "--images", "640x480,64x64")
    assert result.code == 0
    assert "image of 640x480, 334 tokens" in result.out, "20 x 15 tokens of 32 pixels, 2 around them, 32 of a question"
    assert "image of 64x64, 38 tokens" in result.out
    assert command("doctor", tmp_path, "--images", "640").code == 2


def test_doctor_reads_a_gguf_header(command, tiny: Path) -> None:
    model = json.loads(command("doctor", tiny.parent / "tiny.gguf", "--ratio", "1/2", "--json").out)["model"]
    assert model["architecture"] == "LlamaForCausalLM"
    assert model["skipped_layers"] == [1]


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["bench", "-h"], ["--version"]])
def test_help(command, arguments: list[str]) -> None:
    result = command(*arguments)
    assert result.code == 0
    assert result.err == ""
    assert {"--help": "compare", "--version": sp.__version__, "-h": "--lengths"}[arguments[-1]] in result.out or (
        arguments[0] == "generate" and "--max-new-tokens" in result.out
    )


def test_no_command_shows_the_help(command) -> None:
    result = command()
    assert result.code == 2
    assert "generate" in result.err


@pytest.mark.parametrize(
    ("failure", "code", "message"),
    [
        (KeyboardInterrupt(), 130, ""),
        (MemoryError(), 1, "error: out of memory"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 1, "error: out of memory"),
        (sp.UnsupportedModelError("layer 3:\nnot known"), 1, "error: layer 3: not known"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_can_happen_on_the_way(command, monkeypatch, failure: BaseException, code: int, message: str) -> None:
    def fail(*_: object) -> None:
        raise failure

    monkeypatch.setattr("stageprune.cli.generate.load_model", fail)
    result = command("generate", "x")
    assert result.code == code
    assert result.out == ""
    assert len(result.err.splitlines()) == bool(message)
    assert message in result.err


def test_a_mistake_of_ours_is_not_hidden(command, monkeypatch) -> None:
    monkeypatch.setattr("stageprune.cli.generate.load_model", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command("generate", "x")


def test_names_of_models(tmp_path: Path) -> None:
    assert common.shown_name(str(tmp_path)) == tmp_path.name
    assert common.shown_name("meta-llama/Llama-3.1-8B") == "meta-llama/Llama-3.1-8B"


def test_the_demo_prompt(demo) -> None:
    from stageprune.cli.compare import QUESTION, TOPIC

    text = demo.tokenizer.decode(prompt_of(demo.tokenizer, 2000, QUESTION, topic=TOPIC))
    assert "str.capitalize" in text.partition(QUESTION)[0] or "capitalized" in text
    assert QUESTION in text
