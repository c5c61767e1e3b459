"""From tokens to text while they come, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_PENDING = 3  # bytes, and so tokens, that the beginning of a UTF-8 character can have
_KEPT, _LONGEST = 8, 32  # tokens of the window that is decoded


class Detokenizer:
    """Decodes a growing sequence; its pieces together are what decoding the whole at once gives.

    A token can end within a character, whose bytes then come with the next ones: such ends are held back. Only a window
    of the last tokens is decoded each time, so that long answers cost no more per token than short ones. A character
    that begins in the prompt is the prompt's.

    Args:
        tokenizer: of transformers; special tokens give no text.
        context: the end of the prompt: some tokenizers drop the space before the first token that they are given.
    """

    def __init__(self, tokenizer: Any, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window = list(context[-_KEPT:])
        self._given = len(self._decoded())

    def push(self, token: int) -> str:
        """The text that this token adds, as far as it is certain."""
        self._window.append(token)
        settled = _settled(self._decoded())
        new = settled[self._given :]
        self._given = max(self._given, len(settled))
        if len(self._window) > _LONGEST:
            del self._window[:-_KEPT]
            self._given = len(_settled(self._decoded()))
        return new

    def flush(self) -> str:
        """What was held back; nothing follows."""
        text = self._decoded()
        new = text[self._given :]
        self._given = len(text)
        return new

    def _decoded(self) -> str:
        # Cleaning up would move spaces that were given out already.
        text: str = self._tokenizer.decode(self._window, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


def _settled(text: str) -> str:
    """Without an end that the next token may turn into another character."""
    end = len(text)
    while end > max(0, len(text) - _PENDING) and text[end - 1] == _REPLACEMENT:
        end -= 1
    return text[:end]


class StopStrings:
    """Ends a text before the first of some strings, and holds back what may become one.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """What can be given out; after a stop string (`found`), nothing more."""
        if self.found:
            return ""
        text = self._held + text
        starts = [start for stop in self._stops if (start := text.find(stop)) >= 0]
        if starts:
            self.found, self._held = True, ""
            return text[: min(starts)]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back; nothing follows."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of `text` are the first of `stop`, not all of them."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
