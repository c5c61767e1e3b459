"""What quality is measured on: prompts of several lengths, some with a reference answer.

A row of a file or data set has its prompt in one of the fields that `samples.py` names, and may have an answer to it:

    response, reference, answer     a text
    messages, conversations         the answer that follows the last message of the user

Of a bare text (the field `text`, a text file, the built-in text), what follows the prompt is the reference.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from stageprune.errors import DataError
from stageprune.evaluate.rows import Rows, open_data
from stageprune.evaluate.samples import (
    LEAST,
    ROLES_OF_SHAREGPT,
    cut,
    drawn,
    is_text,
    prompt_at,
    prompt_tokens,
    shortened,
    source_name,
)
from stageprune.evaluate.text import held_out_continuations, held_out_prompts

REFERENCE_FIELDS = ("response", "reference", "answer")


@dataclass(frozen=True)
class Example:
    """One prompt.

    Attributes:
        prompt: token ids, two or more.
        reference: token ids of an answer that is not the model's; may be empty.
        bucket: the shortest of the given lengths that is not shorter than the prompt, in tokens.
    """

    prompt: tuple[int, ...]
    reference: tuple[int, ...]
    bucket: int


@dataclass(frozen=True)
class Examples:
    """What to measure on.

    Attributes:
        source: of the data, without the folders it lies in.
        examples: ordered by bucket.
        wanted: how many were asked for; there are fewer if the data has no more that can be used.
    """

    source: str
    examples: tuple[Example, ...]
    wanted: int


def load_examples(
    tokenizer: Any, data: str | None, lengths: Sequence[int], count: int, answer_tokens: int, seed: int
) -> Examples:
    """Read or cut what to measure on.

    Args:
        tokenizer: of the model.
        data: a .jsonl, .parquet or .txt file, the id of a data set on the hub, or None for built-in text that no
            calibration uses.
        lengths: of the prompts, in tokens. Prompts cut from a document have these lengths; rows are put into buckets
            that end at them, and longer prompts end early at the last of them.
        count: how many prompts: of each length, or (from rows) in all.
        answer_tokens: after which a reference is cut off.
        seed: determines which rows or parts of a document are drawn.

    Raises:
        DataError: if the data cannot be read, or nothing in it can be used.
        PromptError: if a length is too short for the built-in text.
    """
    lengths, order = sorted(lengths), random.Random(seed)
    if lengths[0] < LEAST:
        raise DataError(f"a prompt needs at least {LEAST} tokens, so that one is prefill; got {lengths[0]}")
    if data is None:
        found = [example for length in lengths for example in _built_in(tokenizer, length, count, answer_tokens)]
        return Examples("built-in held-out text", tuple(found), count * len(lengths))
    opened = open_data(data)
    if isinstance(opened, str):
        found = []
        for length in lengths:
            pieces = cut(tokenizer, source_name(data), opened, count, length + answer_tokens, order)
            found += [_split(tokens, answer_tokens, lengths) for tokens in pieces.tokens if len(tokens) > LEAST]
        wanted = count * len(lengths)
    else:
        found, wanted = list(_of_rows(tokenizer, opened, lengths, count, answer_tokens, order)), count
    if not found:
        raise DataError(f"nothing in {data!r} fits into a prompt of {LEAST} to {lengths[-1]} tokens")
    return Examples(source_name(data), tuple(sorted(found, key=lambda example: example.bucket)), wanted)


def _built_in(tokenizer: Any, length: int, count: int, answer_tokens: int) -> list[Example]:
    """Every second prompt asks a question, and has no reference."""
    prompts = held_out_prompts(tokenizer, count, length)
    references = held_out_continuations(tokenizer, count, length, answer_tokens)
    return [
        Example(tuple(prompt), tuple(reference), length) for prompt, reference in zip(prompts, references, strict=True)
    ]


def _split(tokens: Sequence[int], answer_tokens: int, lengths: Sequence[int]) -> Example:
    """A piece of a document; the prompt has at least two tokens, also if the piece is short."""
    size = max(len(tokens) - answer_tokens, LEAST)
    return Example(tuple(tokens[:size]), tuple(tokens[size:]), _bucket(size, lengths))


def _of_rows(
    tokenizer: Any, rows: Rows, lengths: Sequence[int], count: int, answer_tokens: int, order: random.Random
) -> Iterator[Example]:
    if rows.local:
        for index in range(len(rows.rows)):
            _reference(rows, index)
    left, most = count, lengths[-1]
    for index in drawn(rows, order):
        if not left:
            return
        source, reference = prompt_at(rows, index), _reference(rows, index)
        goes_on = isinstance(source, str) and reference is None
        tokens = prompt_tokens(tokenizer, source, most + answer_tokens if goes_on else most)
        if tokens is None:
            continue
        if reference is None:
            answer = tokens[most:]
        else:
            answer = tuple(tokenizer(reference, add_special_tokens=False, verbose=False).input_ids[:answer_tokens])
        left -= 1
        yield Example(tokens[:most], answer, _bucket(len(tokens[:most]), lengths))


def _reference(rows: Rows, index: int) -> str | None:
    """The answer that a row holds; None if it holds none."""
    row = rows.rows[index]
    prompt_at(rows, index)  # complains about what is no row
    for name in REFERENCE_FIELDS:
        value = row.get(name)
        if value is not None:
            if not is_text(value):
                raise DataError(f"{rows.place(index)}: {name!r} must be a text, got {shortened(value)}")
            return value or None
    for name, role, content in (("messages", "role", "content"), ("conversations", "from", "value")):
        if row.get(name) is not None:
            return _answer([(ROLES_OF_SHAREGPT.get(part[role], part[role]), part[content]) for part in row[name]])
    return None


def _answer(messages: Sequence[tuple[str, str]]) -> str | None:
    """The first of the answers that a chat ends with."""
    last = max((place for place, (role, _) in enumerate(messages) if role != "assistant"), default=-1)
    return messages[last + 1][1] or None if last + 1 < len(messages) else None


def _bucket(size: int, lengths: Sequence[int]) -> int:
    return next(length for length in lengths if length >= size)
