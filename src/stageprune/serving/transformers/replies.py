"""From the pieces of answers to responses, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from pydantic import BaseModel

from stageprune.serving.transformers import responses as r
from stageprune.serving.transformers.jobs import FinishReason, Piece, TokenScore


@dataclass
class Answer:
    """One answer, put together from its pieces."""

    text: str = ""
    scores: list[TokenScore] = field(default_factory=list)
    finish: FinishReason = "stop"

    def add(self, piece: Piece) -> None:
        """The next piece."""
        self.text += piece.text
        self.scores += piece.scores
        self.finish = piece.finish or self.finish


class Reply(Protocol):
    """The shape of an endpoint's responses."""

    def chunks(self, piece: Piece) -> Iterator[BaseModel]:
        """The events of a stream that tell a piece."""

    def usage(self, usage: r.Usage) -> BaseModel:
        """The last event of a stream."""

    def whole(self, answers: Sequence[Answer], usage: r.Usage) -> BaseModel:
        """The response without a stream."""


class ChatReply:
    """Of /v1/chat/completions.

    Args:
        model: the name that the client knows.
        scored: whether log-probabilities were asked for.
    """

    def __init__(self, model: str, scored: bool) -> None:
        self._common = _common("chatcmpl", model)
        self._scored = scored
        self._begun: set[int] = set()

    def chunks(self, piece: Piece) -> Iterator[r.ChatChunk]:
        """First the role, then text, then why it ends."""
        if piece.choice not in self._begun:
            self._begun.add(piece.choice)
            yield self._chunk(piece.choice, r.ChatDelta(role="assistant", content=""))
        if piece.text or piece.scores:
            logprobs = _chat_logprobs(piece.scores) if self._scored else None
            yield self._chunk(piece.choice, r.ChatDelta(content=piece.text), logprobs=logprobs)
        if piece.finish:
            yield self._chunk(piece.choice, r.ChatDelta(), finish_reason=piece.finish)

    def usage(self, usage: r.Usage) -> r.ChatChunk:
        """Without choices."""
        return r.ChatChunk(**self._common, choices=[], usage=usage)

    def whole(self, answers: Sequence[Answer], usage: r.Usage) -> r.ChatCompletion:
        """All answers."""
        choices = [
            r.ChatChoice(
                index=index,
                message=r.ChatMessage(content=answer.text),
                logprobs=_chat_logprobs(answer.scores) if self._scored else None,
                finish_reason=answer.finish,
            )
            for index, answer in enumerate(answers)
        ]
        return r.ChatCompletion(**self._common, choices=choices, usage=usage)

    def _chunk(
        self,
        index: int,
        delta: r.ChatDelta,
        logprobs: r.ChatLogprobs | None = None,
        finish_reason: FinishReason | None = None,
    ) -> r.ChatChunk:
        choice = r.ChatChunkChoice(index=index, delta=delta, logprobs=logprobs, finish_reason=finish_reason)
        return r.ChatChunk(**self._common, choices=[choice])


class CompletionReply:
    """Of /v1/completions; arguments as of `ChatReply`."""

    def __init__(self, model: str, scored: bool) -> None:
        self._common = _common("cmpl", model)
        self._scored = scored
        self._offsets: dict[int, int] = {}

    def chunks(self, piece: Piece) -> Iterator[r.Completion]:
        """One for each piece."""
        offset = self._offsets.get(piece.choice, 0)
        self._offsets[piece.choice] = offset + sum(len(score.text) for score in piece.scores)
        choice = self._choice(piece.choice, piece.text, piece.scores, piece.finish, offset)
        yield r.Completion(**self._common, choices=[choice])

    def usage(self, usage: r.Usage) -> r.Completion:
        """Without choices."""
        return r.Completion(**self._common, choices=[], usage=usage)

    def whole(self, answers: Sequence[Answer], usage: r.Usage) -> r.Completion:
        """All answers."""
        choices = [
            self._choice(index, answer.text, answer.scores, answer.finish, 0) for index, answer in enumerate(answers)
        ]
        return r.Completion(**self._common, choices=choices, usage=usage)

    def _choice(
        self, index: int, text: str, scores: Sequence[TokenScore], finish: FinishReason | None, offset: int
    ) -> r.CompletionChoice:
        logprobs = _completion_logprobs(scores, offset) if self._scored else None
        return r.CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=finish)


def _common(prefix: str, model: str) -> dict[str, Any]:
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}


def _chat_logprobs(scores: Sequence[TokenScore]) -> r.ChatLogprobs:
    return r.ChatLogprobs(
        content=[
            r.ChatLogprob(
                token=score.text,
                logprob=score.logprob,
                bytes=_bytes(score.text),
                top_logprobs=[
                    r.TokenLogprob(token=text, logprob=value, bytes=_bytes(text)) for text, value in score.top
                ],
            )
            for score in scores
        ]
    )


def _bytes(text: str) -> list[int] | None:
    return None if text.startswith("token_id:") else list(text.encode())


def _completion_logprobs(scores: Sequence[TokenScore], offset: int) -> r.CompletionLogprobs:
    offsets = []
    for score in scores:
        offsets.append(offset)
        offset += len(score.text)
    return r.CompletionLogprobs(
        tokens=[score.text for score in scores],
        token_logprobs=[score.logprob for score in scores],
        top_logprobs=[dict(score.top) for score in scores],
        text_offset=offsets,
    )
