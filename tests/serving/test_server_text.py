"""Incremental decoding and stop strings against decoding and searching the whole text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from stageprune.serving.transformers.text import Detokenizer, StopStrings


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(tiny_folder)


def pieces(tokenizer: Any, tokens: list[int], context: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, context)
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@settings(max_examples=50)
@given(text=st.text(max_size=80), prompt=st.text(max_size=12))
def test_pieces_are_the_whole_text(tokenizer: Any, text: str, prompt: str) -> None:
    text = text.replace("\N{REPLACEMENT CHARACTER}", "")
    tokens, context = (tokenizer(one, add_special_tokens=False).input_ids for one in (text, prompt))
    parts = pieces(tokenizer, tokens, context)
    assert "".join(parts) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(parts), "no character was told before it was complete"


@settings(max_examples=50)
@given(tokens=st.lists(st.integers(0, 258), max_size=120))
def test_bytes_that_are_no_text(tokenizer: Any, tokens: list[int]) -> None:
    assert "".join(pieces(tokenizer, tokens, [])) == tokenizer.decode(tokens, skip_special_tokens=True)


def test_ascii_is_told_at_once(tokenizer: Any) -> None:
    tokens = tokenizer("abc" * 40, add_special_tokens=False).input_ids
    assert all(pieces(tokenizer, tokens, [])[:-1])


def test_the_space_before_the_first_word_is_kept() -> None:
    """SentencePiece tokenizers drop the space of the first token that they decode."""

    class Dropping:
        def decode(self, tokens: list[int], **_: Any) -> str:
            return "".join(f" {token}" for token in tokens).removeprefix(" ")

    assert "".join(pieces(Dropping(), [3, 4], [1, 2])) == " 3 4"
    assert "".join(pieces(Dropping(), list(range(100)), [1])) == "".join(f" {token}" for token in range(100))


def reference(parts: list[str], stops: list[str]) -> tuple[str, bool]:
    """Look at the whole text after each piece."""
    text = ""
    for part in parts:
        text += part
        starts = [text.find(stop) for stop in stops if stop in text]
        if starts:
            return text[: min(starts)], True
    return text, False


@settings(max_examples=300)
@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_stop_strings(parts: list[str], stops: list[str]) -> None:
    text, found = reference(parts, stops)
    stopping = StopStrings(stops)
    told = ""
    for part in parts:
        told += stopping.push(part)
        assert text.startswith(told), "nothing is taken back"
    assert (told + stopping.flush(), stopping.found) == (text, found)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    stopping = StopStrings(["END"])
    assert [stopping.push(part) for part in ("a", "E", "N", "x", "EN", "DEN")] == ["a", "", "", "ENx", "", ""]
    assert stopping.found
    assert stopping.flush() == ""
