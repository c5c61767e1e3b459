"""From what a client sent to the tokens of prompts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from stageprune.serving.transformers.api_error import ApiError
from stageprune.serving.transformers.jobs import Row
from stageprune.serving.transformers.limits import Limits
from stageprune.serving.transformers.schemas import Message

Prompt = str | list[str] | list[int] | list[list[int]]


class Encoder:
    """Turns prompts into tokens, in any thread.

    Args:
        tokenizer: of transformers.
        vocabulary: how many tokens the model knows.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()  # tokenizers refuse to be used by two threads at some moments

    def chat(self, messages: Sequence[Message]) -> list[int]:
        """Messages through the model's chat template.

        Raises:
            ApiError: if there is none, or it refuses them.
        """
        if not getattr(self._tokenizer, "chat_template", None):
            raise ApiError(400, "the model has no chat template; use /v1/completions", param="messages")
        texts = [{"role": _role(message), "content": _content(message)} for message in messages]
        with self._lock:
            try:
                text = self._tokenizer.apply_chat_template(texts, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # templates are programs that come with the model
                raise ApiError(
                    400, f"the model's chat template refuses the messages: {str(error)[:300]}", param="messages"
                ) from error
            return self._tokens(text, "messages", add_special_tokens=False)

    def completion(self, prompt: Prompt) -> list[list[int]]:
        """The prompts of /v1/completions.

        Raises:
            ApiError: if one has no tokens, or some that the model does not know.
        """
        if isinstance(prompt, str):
            prompts: Sequence[Any] = [prompt]
        else:
            prompts = [prompt] if isinstance(prompt[0], int) else prompt
        with self._lock:
            return [self._tokens(one, "prompt") if isinstance(one, str) else self._known(one) for one in prompts]

    def _tokens(self, text: str, param: str, **options: Any) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:  # JSON can say half of a character
            raise ApiError(400, "the prompt is no valid Unicode text", param=param) from error
        tokens = list(self._tokenizer(text, verbose=False, **options).input_ids)
        if not tokens:
            raise ApiError(400, "the prompt is empty; it needs at least one token", param=param)
        return tokens

    def _known(self, tokens: list[int]) -> list[int]:
        largest = max(tokens)
        if largest >= self._vocabulary:
            raise ApiError(400, f"token {largest}: the model knows tokens 0 to {self._vocabulary - 1}", param="prompt")
        return tokens


def rows(
    prompts: Sequence[Sequence[int]], answers: int, asked: int | None, default: int | None, param: str, limits: Limits
) -> list[Row]:
    """What to generate, in the order of the choices of a response.

    Args:
        prompts: their tokens.
        answers: to each of them.
        asked: tokens of an answer at most, if the client said so.
        default: else; None: as many as there may be.
        param: the parameter that holds the prompts.
        limits: of the server.

    Raises:
        ApiError: if that is more than the limits allow.
    """
    if len(prompts) * answers > limits.max_answers:
        raise ApiError(
            400,
            f"{len(prompts)} prompts with {answers} answers each; a request may have {limits.max_answers} answers",
            param="n" if answers > 1 else param,
        )
    if asked is not None and limits.max_new_tokens is not None and asked > limits.max_new_tokens:
        raise ApiError(
            400,
            f"{asked} new tokens were asked for; this server gives at most {limits.max_new_tokens}",
            param="max_tokens",
        )
    return [
        Row(prompt, _length(len(prompt), asked, default, param, limits)) for prompt in prompts for _ in range(answers)
    ]


def _length(prompt: int, asked: int | None, default: int | None, param: str, limits: Limits) -> int:
    room = limits.max_model_len - prompt
    if (asked or 1) > room:
        raise ApiError(
            400,
            f"the prompt has {prompt} tokens and the answer up to {asked or 1}, together more than the context of "
            f"{limits.max_model_len} tokens",
            param=param,
            code="context_length_exceeded",
        )
    return asked or min(room, default or room, limits.max_new_tokens or room)


def _role(message: Message) -> str:
    return "system" if message.role == "developer" else message.role


def _content(message: Message) -> str:
    return message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
