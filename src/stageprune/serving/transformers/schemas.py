"""The requests of OpenAI's API that are understood; anything else is refused, never silently left out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Probability = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Temperature = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**63 - 1)]
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]

_WITHOUT_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
"""What OpenAI's API takes, and what does not change an answer."""

_NEUTRAL: dict[str, Any] = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "logit_bias": {},
    "best_of": 1,
    "echo": False,
    "suffix": "",
    "tools": [],
    "functions": [],
    "function_call": "none",
    "tool_choice": "none",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
}
"""What clients send though they do not use it: at these values it does nothing."""


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, data: Any) -> Any:
        """In OpenAI's API, null means that a parameter was left out."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if value is not None}


class StreamOptions(_Strict):
    """`include_usage`: a last chunk says how many tokens there were."""

    include_usage: bool = False


class _Request(_Strict):
    """What both endpoints take."""

    model: str
    max_tokens: Count | None = None
    temperature: Temperature = Field(default=1, description="0 is greedy, as is anything below 0.01.")
    top_p: Probability = 1
    n: Annotated[int, Field(ge=1, le=128)] = 1
    seed: Seed | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=4)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_neutral(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {
            name: value
            for name, value in data.items()
            if name in cls.model_fields
            or not (name in _WITHOUT_EFFECT or (name in _NEUTRAL and value == _NEUTRAL[name]))
        }


class TextPart(_Strict):
    """A part of a message; images and sounds are not understood."""

    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, data: Any) -> Any:
        if isinstance(data, dict) and isinstance(data.get("type"), str) and data["type"] != "text":
            raise ValueError(f"parts of type {data['type'][:40]!r} are not supported, only text")
        return data


class Message(_Strict):
    """A message of a chat. For most chat templates, `developer` is `system`."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None


class ChatRequest(_Request):
    """Body of /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None


class CompletionRequest(_Request):
    """Body of /v1/completions. `prompt`: a text, texts, tokens, or lists of tokens."""

    prompt: (
        str
        | Annotated[list[str], Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
    )
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None
