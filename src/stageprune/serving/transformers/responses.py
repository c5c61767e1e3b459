"""The answers of OpenAI's API, as far as they are given."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel


class ErrorDetails(BaseModel):
    """Inside of `ErrorBody`."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Of every response whose status is not 200."""

    error: ErrorDetails


class Usage(BaseModel):
    """Tokens; a prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(BaseModel):
    """`bytes`: the token's text in UTF-8; null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TokenLogprob):
    """A token and its likeliest alternatives."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of an answer, or of a part of it."""

    content: list[ChatLogprob]
    refusal: None = None


class ChatMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """One of `n` answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length"]


class ChatCompletion(BaseModel):
    """Response of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """What a chunk adds to the answer; `role` comes once."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(BaseModel):
    """What a chunk adds to one of `n` answers."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: Literal["stop", "length"] | None = None


class ChatChunk(BaseModel):
    """An event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionLogprobs(BaseModel):
    """Lists of one entry for each token; `text_offset` counts characters from the beginning of the answer."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """One answer, or what a chunk adds to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"] | None


class Completion(BaseModel):
    """Response of /v1/completions, and an event of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    """The model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "stageprune"
    max_model_len: int


class ModelList(BaseModel):
    """Response of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """Response of /health."""

    status: Literal["ok"] = "ok"
