"""Calibration prompts: every source, and what is wrong with a bad one."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import stageprune as sp
from stageprune.evaluate.samples import load_prompts
from stageprune.models import load
from tiny import write_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(str(write_gguf(tmp_path_factory.mktemp("samples") / "tiny.gguf"))).tokenizer


@pytest.fixture
def plain(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tokenizer, "chat_template", None)
    return tokenizer


def lines(*rows: Any) -> str:
    return "\n".join(json.dumps(row) for row in rows) + "\n"


def write(tmp_path: Path, name: str, content: str | bytes) -> str:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def texts(tokenizer: Any, data: str | None, count: int = 9, length: int = 40, seed: int = 0) -> list[str]:
    return [tokenizer.decode(tokens) for tokens in load_prompts(tokenizer, data, count, length, seed).tokens]


def chat(text: str) -> str:
    return f"<|im_start|>{text}<|im_end|>"


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"text": "abcd efgh"}, "abcd efgh"),
        ({"prompt": "abcd"}, chat("abcd")),
        ({"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "no"}]}, chat("ab")),
        (
            {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}], "text": "other"},
            chat("s") + chat("ab"),
        ),
        ({"conversations": [{"from": "human", "value": "ab"}, {"from": "gpt", "value": "no"}]}, chat("ab")),
        ({"text": "x" * 99}, "x" * 40),
        ({"prompt": "y" * 99}, chat("y" * 38)),
    ],
    ids=["text", "prompt", "messages", "system", "conversations", "long-text", "long-prompt"],
)
def test_every_field(tokenizer: Any, tmp_path: Path, row: dict[str, Any], expected: str) -> None:
    assert texts(tokenizer, write(tmp_path, "d.jsonl", lines(row))) == [expected]


def test_without_a_chat_template_the_contents_are_the_prompt(plain: Any, tmp_path: Path) -> None:
    rows = lines(
        {"prompt": "abcd"}, {"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}
    )
    assert sorted(texts(plain, write(tmp_path, "d.jsonl", rows))) == ["abcd", "s\n\nu"]


def test_rows_are_drawn_by_the_seed_and_unusable_ones_left_out(tokenizer: Any, tmp_path: Path) -> None:
    rows = [{"text": f"row {index:02}"} for index in range(30)] + [{"text": "z"}] * 30
    data = write(tmp_path, "d.jsonl", "\r\n\n".join(json.dumps(row) for row in rows))
    drawn = [texts(tokenizer, data, count=10, seed=seed) for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert len(set(drawn[0])) == 10
    everything = load_prompts(tokenizer, data, 99, 40, 0)
    assert sorted(tokenizer.decode(tokens) for tokens in everything.tokens) == [
        f"row {index:02}" for index in range(30)
    ]
    assert (everything.source, everything.wanted) == ("d.jsonl", 99)


def test_a_text_file_is_cut_into_distinct_prompts(tokenizer: Any, tmp_path: Path) -> None:
    text = "".join(f"{index:04}" for index in range(100))
    cut = texts(tokenizer, write(tmp_path, "d.txt", text), count=8, length=40)
    assert len(set(cut)) == 8
    assert all(part in text and len(part) == 40 for part in cut)
    assert len(texts(tokenizer, write(tmp_path, "d.txt", text), count=99, length=40)) == 400 // 16
    assert texts(tokenizer, write(tmp_path, "d.txt", "abcde")) == ["abcde"]


def test_the_built_in_text(tokenizer: Any) -> None:
    prompts = load_prompts(tokenizer, None, 200, 256, 0)
    assert len(set(prompts.tokens)) == 200
    assert {len(tokens) for tokens in prompts.tokens} == {256}


def test_questions_about_the_built_in_text(tokenizer: Any) -> None:
    """Every second prompt; it loses its end for them, and is left alone where nothing of it would be left."""
    bare = load_prompts(tokenizer, None, 30, 90, 0)
    asked = load_prompts(tokenizer, None, 30, 90, 0, questions=True)
    assert (bare.source, asked.source) == ("built-in text", "built-in text with questions")
    assert asked.tokens[::2] == bare.tokens[::2]
    found = set()
    for before, after in zip(bare.tokens[1::2], asked.tokens[1::2], strict=True):
        prose, _, question = tokenizer.decode(after).rpartition("\n\n")
        start = prose.removeprefix("<|im_start|>")
        assert len(start) == len(prose) - len("<|im_start|>")
        assert len(start) >= 20
        assert tokenizer.decode(before).startswith(start.rstrip("\ufffd")), "a character can be cut in two"
        assert len(after) == 90
        assert question.endswith(("?<|im_end|>", ".<|im_end|>"))
        found.add(question)
    assert len(found) > 3
    short = load_prompts(tokenizer, None, 30, 20, 0, questions=True)
    assert short.tokens == load_prompts(tokenizer, None, 30, 20, 0).tokens


def test_parquet(tokenizer: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    messages = [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]]
    parquet.write_table(pyarrow.table({"messages": messages}), tmp_path / "d.parquet")
    assert sorted(texts(tokenizer, str(tmp_path / "d.parquet"))) == [chat("ab"), chat("cd")]
    with pytest.raises(sp.DataError, match=r"cannot read .*bad\.parquet"):
        texts(tokenizer, write(tmp_path, "bad.parquet", "PAR1"))


def fake_datasets(load_dataset: Any) -> types.ModuleType:
    module = types.ModuleType("datasets")
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    return module


def test_a_data_set_of_the_hub(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_dataset(name: str, split: str) -> list[dict[str, str]]:
        assert (name, split) == ("WizardLM/WizardLM_evol_instruct_V2_196k", "train")
        return [{"prompt": "ab"}, {"prompt": "cd"}]

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(load_dataset))
    name = "WizardLM/WizardLM_evol_instruct_V2_196k"
    prompts = load_prompts(tokenizer, name, 1, 40, 0)
    assert prompts.source == name
    assert len(prompts.tokens) == 1

    def fail(name: str, split: str) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", fake_datasets(fail))
    with pytest.raises(sp.DataError, match=r"'no/such'.*no network"):
        texts(tokenizer, "no/such")


@pytest.mark.parametrize(("data", "package"), [("d.parquet", "pyarrow"), ("some/data", "datasets")])
def test_missing_packages(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "d.parquet").write_bytes(b"")
    with pytest.raises(sp.DataError, match=rf"{package}.*stageprune\[data\]"):
        texts(tokenizer, data)


GOOD = {"text": "abcd"}
BAD = {
    "no-json": ("d.jsonl", lines(GOOD) + "{oops}\n", r"'.*d\.jsonl', line 2: no JSON"),
    "cut-off": ("d.jsonl", lines(GOOD, GOOD)[:-5], r"line 2: no JSON"),
    "deep": ("d.jsonl", "[" * 100_000, r"line 1: no JSON"),
    "a-list": ("d.jsonl", lines(GOOD, ["text"]), r"line 2: expected an object .*list"),
    "no-field": ("d.jsonl", lines(GOOD) + "\n" + lines({"body": "x"}), r"line 3: none of the fields.*it has 'body'"),
    "no-fields": ("d.jsonl", lines({}), r"line 1: .*no field at all"),
    "nulls": ("d.jsonl", lines({"text": None}), r"line 1: none of"),
    "number": ("d.jsonl", lines({"text": 5}), r"line 1: 'text' must be a text .*got 5"),
    "blank": ("d.jsonl", lines({"prompt": "  "}), r"line 1: 'prompt' must be a text"),
    "surrogate": ("d.jsonl", '{"text": "ab\\ud800"}', r"line 1: 'text' must be a text"),
    "no-messages": ("d.jsonl", lines({"messages": []}), r"line 1: 'messages' has no message"),
    "a-message": ("d.jsonl", lines({"messages": {"role": "user"}}), r"line 1: 'messages' must be a list"),
    "no-content": ("d.jsonl", lines({"messages": [{"role": "user"}]}), r"'messages': a message needs"),
    "answers": ("d.jsonl", lines({"messages": [{"role": "assistant", "content": "x"}]}), r"no message before"),
    "share-gpt": ("d.jsonl", lines({"conversations": [{"role": "user"}]}), r"'conversations': .*'from'.*'value'"),
    "too-short": ("d.jsonl", lines({"text": "a"}), r"no row .* fits into a prompt of 2 to 40 tokens"),
    "short-text": ("d.txt", "a", r"'d\.txt': no prompt of 2 to 40"),
    "empty": ("d.jsonl", " \n", r"d\.jsonl' is empty"),
    "empty-text": ("d.txt", "", r"d\.txt' is empty"),
    "latin": ("d.txt", b"\xe9t\xe9", r"d\.txt' is not UTF-8 text: byte 0"),
    "zero": ("d.txt", b"a\0b", r"holds a zero byte"),
    "other-kind": ("d.csv", "a,b", r"is a file; calibration data is a file that ends in \.jsonl"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_is_refused_with_its_place(tokenizer: Any, tmp_path: Path, name: str) -> None:
    file, content, message = BAD[name]
    with pytest.raises(sp.DataError, match=message):
        texts(tokenizer, write(tmp_path, file, content))


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.txt", "nul\0.txt"], ids=["jsonl", "txt", "nul"])
def test_missing_files(tokenizer: Any, tmp_path: Path, name: str) -> None:
    with pytest.raises(sp.DataError, match="cannot read"):
        texts(tokenizer, str(tmp_path / name))
    with pytest.raises(sp.DataError, match="is a folder"):
        texts(tokenizer, str(tmp_path))


def test_a_prompt_of_one_token_is_refused(tokenizer: Any) -> None:
    with pytest.raises(sp.DataError, match="at least 2 tokens"):
        texts(tokenizer, None, length=1)
