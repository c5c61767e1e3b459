"""What quality is measured on: buckets and references from every source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import stageprune as sp
from stageprune.evaluate.examples import load_examples
from stageprune.evaluate.text import held_out_text
from stageprune.models import load
from tiny import write_gguf


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load(str(write_gguf(tmp_path_factory.mktemp("examples") / "tiny.gguf"))).tokenizer


def write(tmp_path: Path, *rows: Any) -> str:
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def shown(tokenizer: Any, data: str | None, lengths: tuple[int, ...], answer: int = 6) -> list[tuple[str, str, int]]:
    found = load_examples(tokenizer, data, lengths, 9, answer, 0)
    return [(tokenizer.decode(one.prompt), tokenizer.decode(one.reference), one.bucket) for one in found.examples]


def test_the_built_in_text(tokenizer: Any) -> None:
    """Prose goes on as the text does; questions have no reference."""
    found = load_examples(tokenizer, None, (60, 90), 3, 8, 0)
    assert found.wanted == 6
    assert [len(one.prompt) for one in found.examples] == [60] * 3 + [90] * 3
    assert [one.bucket for one in found.examples] == [60] * 3 + [90] * 3
    assert [len(one.reference) for one in found.examples] == [8, 0, 8] * 2
    first = found.examples[0]
    assert tokenizer.decode(first.prompt + first.reference) in held_out_text()
    assert "Summarise" in tokenizer.decode(found.examples[1].prompt)


@pytest.mark.parametrize(
    ("row", "prompt", "reference"),
    [
        ({"prompt": "ab", "response": "cd"}, "<|im_start|>ab<|im_end|>", "cd"),
        ({"prompt": "ab", "reference": "cd"}, "<|im_start|>ab<|im_end|>", "cd"),
        ({"prompt": "ab", "answer": "cdefghijk"}, "<|im_start|>ab<|im_end|>", "cdefgh"),
        ({"prompt": "ab"}, "<|im_start|>ab<|im_end|>", ""),
        ({"prompt": "ab", "answer": ""}, "<|im_start|>ab<|im_end|>", ""),
        ({"text": "abcd", "answer": "xy"}, "abcd", "xy"),
        ({"text": "abcd"}, "abcd", ""),
        ({"text": "b" * 30 + "cdefghijk"}, "b" * 30, "cdefgh"),
        (
            {"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]},
            "<|im_start|>ab<|im_end|>",
            "cd",
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "ab"},
                    {"from": "gpt", "value": "no"},
                    {"from": "human", "value": "ef"},
                    {"from": "gpt", "value": "cd"},
                ]
            },
            "<|im_start|>ab<|im_end|><|im_start|>no<|im_end|><|im_start|>ef<|im_end|>",
            "cd",
        ),
        ({"messages": [{"role": "user", "content": "ab"}]}, "<|im_start|>ab<|im_end|>", ""),
    ],
    ids=["response", "reference", "answer-cut", "none", "empty", "text", "bare", "goes-on", "chat", "turns", "open"],
)
def test_every_field(tokenizer: Any, tmp_path: Path, row: dict[str, Any], prompt: str, reference: str) -> None:
    assert shown(tokenizer, write(tmp_path, row), (30,)) == [(prompt, reference, 30)]


def test_buckets_end_at_the_lengths(tokenizer: Any, tmp_path: Path) -> None:
    data = write(tmp_path, *({"text": letter * size} for letter, size in (("c", 25), ("b", 11), ("a", 10), ("d", 45))))
    found = shown(tokenizer, data, (10, 20, 40), 6)
    assert sorted(found) == [
        ("a" * 10, "", 10),
        ("b" * 11, "", 20),
        ("c" * 25, "", 40),
        ("d" * 40, "d" * 5, 40),
    ]
    assert [bucket for _, _, bucket in found] == [10, 20, 40, 40]


def test_a_text_file(tokenizer: Any, tmp_path: Path) -> None:
    text = "".join(f"{index:04}" for index in range(500))
    path = tmp_path / "d.txt"
    path.write_text(text)
    found = shown(tokenizer, str(path), (20, 50), 6)
    assert [(len(prompt), len(reference), bucket) for prompt, reference, bucket in found] == (
        [(20, 6, 20)] * 9 + [(50, 6, 50)] * 9
    )
    assert all(prompt + reference in text for prompt, reference, _ in found)


def test_parquet(tokenizer: Any, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["abcd"], "answer": ["ef"]}), tmp_path / "d.parquet")
    assert shown(tokenizer, str(tmp_path / "d.parquet"), (30,)) == [("abcd", "ef", 30)]


def test_a_data_set(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no file goes to `datasets`, here to a data set that lies in a local folder of files."""
    datasets = pytest.importorskip("datasets")
    folder = tmp_path / "set"
    folder.mkdir()
    (folder / "train.jsonl").write_text('{"prompt": "ab", "answer": "cd"}\n{"prompt": "ef", "answer": null}\n')
    original = datasets.load_dataset

    def load_dataset(name: str, split: str) -> Any:
        assert name == "someone/set"
        return original(str(folder), split=split, cache_dir=str(tmp_path / "cache"))

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert sorted(shown(tokenizer, "someone/set", (30,))) == [
        ("<|im_start|>ab<|im_end|>", "cd", 30),
        ("<|im_start|>ef<|im_end|>", "", 30),
    ]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "ab", "answer": 5}, r"line 2: 'answer' must be a text, got 5"),
        ({"prompt": "ab", "response": ["x"]}, r"line 2: 'response' must be a text"),
        ({"answer": "ab"}, r"line 2: none of the fields"),
        (["ab"], r"line 2: expected an object"),
    ],
    ids=["number", "list", "no-prompt", "no-object"],
)
def test_bad_rows(tokenizer: Any, tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(sp.DataError, match=message):
        shown(tokenizer, write(tmp_path, {"text": "good"}, row), (30,))


def test_nothing_to_use(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(sp.DataError, match=r"nothing in .* fits into a prompt of 2 to 30 tokens"):
        shown(tokenizer, write(tmp_path, {"text": "a"}), (30,))
    with pytest.raises(sp.DataError, match="at least 2 tokens"):
        shown(tokenizer, None, (1, 30))
