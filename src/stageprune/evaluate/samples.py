"""The prompts of calibration samples: from a file, a data set of the Hugging Face hub, or the text of every Python.

A file or data set has one sample a row, in one of these fields:

    messages        a chat: [{"role": "user", "content": "..."}, ...]; trailing answers are dropped
    conversations   likewise as ShareGPT writes it: [{"from": "human", "value": "..."}, ...]
    prompt          an instruction, put into the model's chat template if it has one
    text            bare text, of which the beginning is the prompt

A text file, like the built-in text, is one document that is cut into distinct prompts. Models are used for chats more
than for bare prose, and a fit to one is not a fit to the other: where asked for, every second prompt cut from the
built-in text asks something about it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from stageprune.errors import DataError
from stageprune.evaluate.rows import Rows, is_file, open_data
from stageprune.evaluate.text import calibration_text, question_frame, special_prefix

LEAST = 2
"""Tokens of a prompt: with one, nothing is prefill."""

_QUESTIONS = (
    "What is the main point of this?",
    "Explain this to a beginner.",
    "Give an example of this.",
    "Rewrite this more clearly.",
    "List the key facts.",
    "Translate this into French.",
    "What follows from this?",
)
_PIECE = 16  # tokens that a prompt cut from a document has at least, if the document is short

Messages: TypeAlias = list[dict[str, str]]


ROLES_OF_SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant"}
"""What its roles are called elsewhere."""


@dataclass(frozen=True)
class Prompts:
    """Calibration prompts.

    Attributes:
        source: of the data, without the folders it lies in.
        tokens: token ids of each prompt, at least two.
        wanted: how many were asked for; there are fewer if the data has no more that can be used.
    """

    source: str
    tokens: tuple[tuple[int, ...], ...]
    wanted: int


def load_prompts(
    tokenizer: Any, data: str | None, count: int, max_tokens: int, seed: int, questions: bool = False
) -> Prompts:
    """Draw calibration prompts.

    Args:
        tokenizer: of the model.
        data: a .jsonl, .parquet or .txt file, the id of a data set on the hub, or None for the built-in text.
        count: how many prompts.
        max_tokens: the length of a prompt at most; longer texts end early, longer chats with a shorter last message.
        seed: determines which rows are drawn, and their order.
        questions: whether every second prompt cut from the built-in text asks something about it, in the model's chat
            template if it has one.

    Raises:
        DataError: if the data cannot be read, or no row can be used.
    """
    if max_tokens < LEAST:
        raise DataError(f"a prompt needs at least {LEAST} tokens, so that one is prefill; got {max_tokens}")
    order = random.Random(seed)
    if data is None:
        prompts = cut(tokenizer, "built-in text", calibration_text(), count, max_tokens, order)
        return _asked(tokenizer, prompts, max_tokens) if questions else prompts
    opened = open_data(data)
    if isinstance(opened, str):
        return cut(tokenizer, source_name(data), opened, count, max_tokens, order)
    found: list[tuple[int, ...]] = []
    for index in drawn(opened, order):
        tokens = prompt_tokens(tokenizer, prompt_at(opened, index), max_tokens)
        if tokens is not None:
            found.append(tokens)
        if len(found) == count:
            break
    if not found:
        raise DataError(f"no row of {data!r} fits into a prompt of {LEAST} to {max_tokens} tokens")
    return Prompts(source_name(data), tuple(found), count)


def source_name(data: str) -> str:
    """Data as results name it: a file without the folders that it lies in."""
    return data.replace("\\", "/").rsplit("/", 1)[-1] if is_file(data) else data


def drawn(rows: Rows, order: random.Random) -> Iterator[int]:
    """The indices of all rows in random order; a local file is checked as a whole before the first."""
    if rows.local:
        for index in range(len(rows.rows)):
            prompt_at(rows, index)
    yield from order.sample(range(len(rows.rows)), len(rows.rows))


def prompt_at(rows: Rows, index: int) -> str | Messages:
    """The prompt of a row: a bare text, or the messages of a chat that ends with the user's.

    Raises:
        DataError: if the row has none; names its place.
    """
    row, where = rows.rows[index], rows.place(index)
    if not isinstance(row, dict):
        raise DataError(f"{where}: expected an object with a field such as 'text', got {type(row).__name__}")
    for name, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(name) is not None:
            return _chat(row[name], role, content, f"{where}: {name!r}")
    for name in ("prompt", "text"):
        if row.get(name) is not None:
            value = row[name]
            if not is_text(value) or not value.strip():
                raise DataError(f"{where}: {name!r} must be a text that is not empty, got {shortened(value)}")
            return value if name == "text" else [{"role": "user", "content": value}]
    raise DataError(
        f"{where}: none of the fields 'messages', 'conversations', 'prompt' and 'text'; it has "
        f"{', '.join(map(repr, row)) or 'no field at all'}"
    )


def _chat(value: Any, role: str, content: str, where: str) -> Messages:
    if not isinstance(value, (list, tuple)) or not all(isinstance(message, dict) for message in value):
        raise DataError(f"{where} must be a list of objects with {role!r} and {content!r}, got {shortened(value)}")
    messages = []
    for message in value:
        parts = message.get(role), message.get(content)
        if not all(map(is_text, parts)):
            raise DataError(f"{where}: a message needs the texts {role!r} and {content!r}, got {shortened(message)}")
        messages.append({"role": ROLES_OF_SHAREGPT.get(parts[0], parts[0]), "content": parts[1]})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise DataError(f"{where} has no message before the first answer")
    return messages


def is_text(value: Any) -> bool:
    """Whether this is a string that tokenizers take: JSON can also hold halves of characters."""
    return isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value)


def shortened(value: Any) -> str:
    """A value in a message: ASCII, and not too long."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def prompt_tokens(tokenizer: Any, prompt: str | Messages, most: int) -> tuple[int, ...] | None:
    """The tokens of a prompt, at most `most`; None if it cannot be made to fit, or is too short."""
    if isinstance(prompt, list) and getattr(tokenizer, "chat_template", None):
        return _chat_tokens(tokenizer, prompt, most)
    text = prompt if isinstance(prompt, str) else "\n\n".join(message["content"] for message in prompt)
    tokens = [*special_prefix(tokenizer), *tokenizer(text, add_special_tokens=False, verbose=False).input_ids]
    return tuple(tokens[:most]) if len(tokens) >= LEAST else None


def _chat_tokens(tokenizer: Any, messages: Messages, most: int) -> tuple[int, ...] | None:
    """As `prompt_tokens`; the last message is shortened from its end until the whole chat fits."""
    content = tokenizer(messages[-1]["content"], add_special_tokens=False, verbose=False).input_ids
    while True:
        try:
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:  # templates are programs that come with the model
            raise DataError(f"the model's chat template refuses a sample: {error}") from error
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if len(tokens) <= most:
            return tuple(tokens) if len(tokens) >= LEAST else None
        content = content[: max(0, len(content) - (len(tokens) - most))]
        if not content:
            return None
        messages = [*messages[:-1], {**messages[-1], "content": tokenizer.decode(content)}]


def cut(tokenizer: Any, source: str, text: str, count: int, most: int, order: random.Random) -> Prompts:
    """Distinct prompts from one document, as long as `count` of them can be."""
    prefix: Sequence[int] = special_prefix(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    room = most - len(prefix)
    if room < 1 or len(tokens) + len(prefix) < LEAST:
        raise DataError(f"{source!r}: no prompt of {LEAST} to {most} tokens can be cut from its {len(tokens)} tokens")
    size = max(min(room, len(tokens) // count), min(room, len(tokens), _PIECE))
    pieces = [(*prefix, *tokens[start : start + size]) for start in range(0, len(tokens) - size + 1, size)]
    return Prompts(source, tuple(order.sample(pieces, min(count, len(pieces)))), count)


def _asked(tokenizer: Any, prompts: Prompts, most: int) -> Prompts:
    """The same prompts, every second one with a question behind it; it loses its end where there is no room."""
    prefix = len(special_prefix(tokenizer))
    asked: list[tuple[int, ...]] = []
    for index, tokens in enumerate(prompts.tokens):
        head, tail = question_frame(tokenizer, _QUESTIONS[index // 2 % len(_QUESTIONS)])
        room = most - len(head) - len(tail)
        asked.append((*head, *tokens[prefix:][:room], *tail) if index % 2 and room > 0 else tokens)
    return replace(prompts, source=f"{prompts.source} with questions", tokens=tuple(asked))
