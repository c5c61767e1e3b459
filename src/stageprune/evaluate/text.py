"""English text that every Python carries: for calibration, and to measure on, when the user names no data set.

`pydoc_data.topics` is the language reference behind `help()`. Its prose (about 320 kB, without headings, grammars and
code) is split by topic into text to calibrate on and held-out text to measure on. Some topics repeat parts of others,
so what the held-out topics say is taken out of the calibration text: nothing is measured on what was calibrated on.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from functools import cache
from pydoc_data import topics as _reference
from typing import Any
from zlib import crc32

from stageprune.errors import PromptError

_SHARES, _HELD_OUT = 4, 3  # topics are dealt into four shares by name; this one is held out
_QUESTION, _STRIDE = "Summarise the text above in a few sentences.", 401
_PLACEHOLDER = "@@stageprune-content@@"


def calibration_text() -> str:
    """The text to calibrate on: about 240 kB, the same at every call."""
    return "\n\n".join(_split()[0])


def held_out_text(topic: str | None = None) -> str:
    """The text to measure on: about 50 kB, the same at every call; shares no paragraph with `calibration_text`.

    Args:
        topic: which held-out topic comes first, such as `"objects"`; no effect if this Python has no such topic.
    """
    paragraphs = list(_split()[1])
    first = next(_prose(_reference.topics.get(topic or "", "")), None)
    start = paragraphs.index(first) if first in paragraphs else 0
    return "\n\n".join(paragraphs[start:] + paragraphs[:start])


def prompt_of(
    tokenizer: Any, length: int, question: str | None = None, start: int = 0, topic: str | None = None
) -> list[int]:
    """A prompt of exactly `length` tokens of held-out prose.

    Args:
        tokenizer: of the model.
        length: of the whole prompt, in tokens, special ones included.
        question: asked below the prose. With a question the prompt goes through the chat template, where the
            tokenizer has one; without, it is the bare prose.
        start: where in the held-out text to begin, in tokens (prompts of a batch shall differ). The text starts over
            when it ends.
        topic: which held-out topic comes first; see `held_out_text`.

    Returns:
        Token ids.

    Raises:
        PromptError: if `length` is no positive integer, or too short for the template and the question.
    """
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise PromptError(f"the length of a prompt is a positive number of tokens, got {length!r}")
    head, tail = (special_prefix(tokenizer), []) if question is None else question_frame(tokenizer, question)
    room = length - len(head) - len(tail)
    if room < 0 or (question is not None and room == 0):
        raise PromptError(
            f"a prompt of {length} token(s) has no room for text: the template and the question take "
            f"{len(head) + len(tail)}"
        )
    return [*head, *_tokens(tokenizer, held_out_text(topic), start, room), *tail]


def held_out_prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Prompts of held-out prose to measure quality on, each of `length` tokens; every second one asks a question.

    Raises:
        PromptError: if `length` is too short for the template and the question.
    """
    return [
        prompt_of(tokenizer, length, _QUESTION if index % 2 else None, start=index * _STRIDE) for index in range(count)
    ]


def held_out_continuations(tokenizer: Any, count: int, length: int, tokens: int) -> list[list[int]]:
    """How the text of each of `held_out_prompts` goes on, in `tokens` tokens; nothing where a question is asked."""
    return [
        [] if index % 2 else prompt_of(tokenizer, length + tokens, start=index * _STRIDE)[length:]
        for index in range(count)
    ]


def calibration_prompts(tokenizer: Any, count: int, length: int) -> list[list[int]]:
    """Pieces of the calibration text, evenly spread: `count` of `length` tokens each, bare prose."""
    tokens: list[int] = tokenizer(calibration_text(), add_special_tokens=False, verbose=False).input_ids
    stride = max(len(tokens) // count, 1)
    pieces = [tokens[start : start + length] for start in range(0, count * stride, stride)]
    return [piece for piece in pieces if len(piece) > 1]


@cache
def _split() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The paragraphs to calibrate on and the held-out ones."""
    topics: dict[str, str] = _reference.topics
    # A checksum of the name, not its place in the list: a topic stays on its side when Python adds others.
    names = {name for name in topics if crc32(name.encode()) % _SHARES == _HELD_OUT}
    held_out = _distinct(topics[name] for name in sorted(names))
    others = _distinct((topics[name] for name in sorted(topics) if name not in names), without=set(held_out))
    return others, held_out


def _distinct(texts: Iterable[str], without: Collection[str] = ()) -> tuple[str, ...]:
    """The paragraphs of some texts in order, each once."""
    found = dict.fromkeys(paragraph for text in texts for paragraph in _prose(text))
    return tuple(paragraph for paragraph in found if paragraph not in without)


def _prose(text: str) -> Iterator[str]:
    """The paragraphs of a text that are English sentences, each on one line."""
    for part in re.split(r"\n\s*\n", text):
        paragraph = " ".join(part.split())
        letters = sum(character.isalpha() or character == " " for character in paragraph)
        if len(paragraph.split()) >= 8 and letters >= 0.85 * len(paragraph) and paragraph[-1] in ".:;":
            yield paragraph


def question_frame(tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """The tokens before and after the prose when a question is asked about it: of the chat template and the question.

    Without a chat template the question stands below the prose.

    Raises:
        PromptError: if the template drops or rewrites what the user says.
    """
    content = f"{_PLACEHOLDER}\n\n{question}"
    if getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prefix: list[int] = []  # the template writes the special tokens itself
    else:
        text, prefix = f"{content}\n", special_prefix(tokenizer)
    before, found, after = text.partition(_PLACEHOLDER)
    if not found:
        raise PromptError("the tokenizer's chat template drops or rewrites the user's message")
    head = tokenizer(before, add_special_tokens=False).input_ids if before else []
    return [*prefix, *head], tokenizer(after, add_special_tokens=False).input_ids


def special_prefix(tokenizer: Any) -> list[int]:
    """What the tokenizer puts in front of a bare text, such as the beginning-of-sequence token."""
    plain = tokenizer("a", add_special_tokens=False).input_ids
    special: list[int] = tokenizer("a").input_ids
    for index in range(len(special) - len(plain) + 1):
        if special[index : index + len(plain)] == plain:
            return special[:index]
    return []


def _tokens(tokenizer: Any, text: str, start: int, count: int) -> list[int]:
    """`count` tokens of a text from token `start` on, around its end."""
    # verbose=False: that the whole text is longer than the model's context is no mistake.
    tokens: list[int] = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if not tokens:
        raise PromptError("the tokenizer turns English text into no tokens")
    return [tokens[(start + index) % len(tokens)] for index in range(count)]
