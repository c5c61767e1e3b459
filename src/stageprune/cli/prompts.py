"""From what the user typed, piped or named to the tokens of a prompt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from stageprune.cli.common import UsageProblem
from stageprune.errors import PromptError


def read_prompt(argument: str | None, file: Path | None) -> str | None:
    """The prompt's text, from wherever it was given; None if it was not given at all.

    Raises:
        UsageProblem: if it was given twice.
        PromptError: if it is empty, or no readable text.
    """
    if argument is not None and file is not None:
        raise UsageProblem(f"the prompt was given twice: as an argument and as --file {str(file)!r}")
    if file is not None:
        return _checked(_decoded(_bytes_of(file), repr(str(file))), f"the file {str(file)!r}")
    if argument == "-":
        return _checked(_decoded(sys.stdin.buffer.read(), "the standard input"), "the standard input")
    return None if argument is None else _checked(argument, f"the prompt {argument!r}")


def piped_prompt() -> str:
    """The prompt from the standard input, for a command that cannot go without one.

    Raises:
        UsageProblem: if nobody pipes anything in.
        PromptError: if it is empty, or no readable text.
    """
    if sys.stdin is None or sys.stdin.isatty():
        raise UsageProblem("no prompt: give one as an argument, with --file, or through a pipe")
    prompt = read_prompt("-", None)
    assert prompt is not None
    return prompt


def tokens_of(tokenizer: Any, text: str, chat: bool | None) -> list[int]:
    """The tokens of a prompt, through the chat template or not (None: if the tokenizer has one).

    Raises:
        PromptError: if the chat template is missing or refuses the text, or no token comes out.
    """
    template = getattr(tokenizer, "chat_template", None)
    if chat and not template:
        raise PromptError("--chat: the model's tokenizer has no chat template; use --no-chat")
    if template and chat is not False:
        try:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates are programs that come with the model
            raise PromptError(f"the model's chat template fails: {error}; try --no-chat") from error
        tokens = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    else:
        tokens = tokenizer(text, verbose=False).input_ids
    if not tokens:
        raise PromptError("the tokenizer turns the prompt into no tokens")
    return list(tokens)


def check_fits(model: Any, length: int, new_tokens: int, option: str = "--max-new-tokens") -> None:
    """Raises PromptError if a prompt of `length` tokens and its answer are longer than the model's context."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if longest is not None and length + new_tokens > longest:
        raise PromptError(
            f"the prompt has {length} tokens and the answer up to {new_tokens}, together more than the model's "
            f"context of {longest}; shorten the prompt or lower {option}"
        )


def _bytes_of(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = error.strerror if isinstance(error, OSError) else error
        raise PromptError(f"cannot read the prompt from {str(file)!r}: {reason}") from error


def _decoded(content: bytes, name: str) -> str:
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"{name} is not UTF-8 text: byte {error.start} is {content[error.start]:#04x}") from error
    if "\0" in text:
        raise PromptError(f"{name} is not text: it holds a zero byte at {content.index(0)}")
    return text


def _checked(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # an argument that was no UTF-8
        raise PromptError(f"{name} is not UTF-8 text") from error
    if not text.strip():
        raise PromptError(f"{name} is empty; a prompt needs at least one word")
    return text
