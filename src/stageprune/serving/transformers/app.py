"""The routes of the OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from stageprune import __version__
from stageprune.serving.transformers.api_error import ApiError
from stageprune.serving.transformers.encode import rows
from stageprune.serving.transformers.exchange import ClientGone, Exchange
from stageprune.serving.transformers.jobs import Row, Sampling
from stageprune.serving.transformers.middleware import CheckKey, CountOutcomes, ReadBody, error_response
from stageprune.serving.transformers.replies import Answer, ChatReply, CompletionReply, Reply
from stageprune.serving.transformers.responses import (
    ChatCompletion,
    Completion,
    ErrorBody,
    Health,
    ModelCard,
    ModelList,
    Usage,
)
from stageprune.serving.transformers.schemas import ChatRequest, CompletionRequest
from stageprune.serving.transformers.service import Service

_COMPLETION_TOKENS = 16  # what OpenAI's API gives unless it is told otherwise
_CLIENT_GONE = 499  # never sent: there is nobody

_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": description}
    for status, description in {
        400: "The request is wrong, or asks for what this server cannot do.",
        401: "The API key is wrong.",
        404: "There is no such model.",
        408: "The body arrived too slowly.",
        413: "The body is too large.",
        429: "The queue is full.",
        500: "The model failed.",
        503: "The server is shutting down.",
    }.items()
}
# Of one event; OpenAPI 3.1 has no word for a stream of them.
_EVENT = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
_STREAM: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"schema": _EVENT}}, "description": "The answer."}
}


def build_app(service: Service) -> FastAPI:
    """The application; the worker runs as long as it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        service.worker.start()
        yield
        service.worker.close(0)

    app = FastAPI(title="stageprune", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.add_middleware(ReadBody, limits=service.limits)
    if service.api_key is not None:
        app.add_middleware(CheckKey, key=service.api_key)
    app.add_middleware(CountOutcomes, metrics=service.metrics)
    _answer_errors(app)

    @app.get("/health", responses={503: _ERRORS[503]})
    async def health() -> Health:
        if not service.worker.healthy:
            raise ApiError(503, "the server does not answer requests", code="unhealthy")
        return Health()

    @app.get("/metrics", response_class=Response, responses=_only(401) | {200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models", responses=_only(401))
    async def models() -> ModelList:
        return ModelList(data=[_card(service)])

    @app.get("/v1/models/{model:path}", responses=_only(401, 404))
    async def one_model(model: str) -> ModelCard:
        _check_model(service, model)
        return _card(service)

    @app.post("/v1/chat/completions", response_model=ChatCompletion, responses=_ERRORS | _STREAM)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_model(service, body.model)
        sampling = _sampling(body, _chat_logprobs(body))
        asked = _one_of(body.max_completion_tokens, body.max_tokens)

        def prompts() -> list[Row]:
            tokens = service.encoder.chat(body.messages)
            return rows([tokens], body.n, asked, None, "messages", service.limits)

        reply = ChatReply(service.name, sampling.top_logprobs is not None)
        return await _respond(service, request, body, prompts, sampling, reply)

    @app.post("/v1/completions", response_model=Completion, responses=_ERRORS | _STREAM)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(service, body.model)
        sampling = _sampling(body, body.logprobs)

        def prompts() -> list[Row]:
            tokens = service.encoder.completion(body.prompt)
            return rows(tokens, body.n, body.max_tokens, _COMPLETION_TOKENS, "prompt", service.limits)

        reply = CompletionReply(service.name, sampling.top_logprobs is not None)
        return await _respond(service, request, body, prompts, sampling, reply)

    _describe(app)
    return app


async def _respond(
    service: Service,
    request: Request,
    body: ChatRequest | CompletionRequest,
    prompts: Callable[[], list[Row]],
    sampling: Sampling,
    reply: Reply,
) -> Response:
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream", param="stream_options")
    service.worker.reserve()
    try:
        answers = await run_in_threadpool(prompts)
    except BaseException:
        service.worker.release()
        raise
    exchange = Exchange(service.worker, answers, sampling, request.receive)
    counted = _Counted(answers, body.n)
    try:
        if body.stream:
            await exchange.begin()
            usage = body.stream_options is not None and body.stream_options.include_usage
            events = _events(exchange, reply, counted, usage, request)
            return _EventStream(events, exchange)
        whole = [Answer() for _ in answers]
        async for piece in exchange.pieces():
            whole[piece.choice].add(piece)
            counted.new += piece.count
        content = reply.whole(whole, counted.usage()).model_dump()
    except ClientGone:
        request.state.outcome = "cancelled"
        exchange.close()
        return Response(status_code=_CLIENT_GONE)
    except BaseException:
        exchange.close()
        raise
    exchange.close()
    return JSONResponse(content)


class _Counted:
    """Tokens of a request."""

    def __init__(self, answers: Sequence[Row], per_prompt: int) -> None:
        self.prompt = sum(len(row.prompt) for row in answers[::per_prompt])
        self.new = 0

    def usage(self) -> Usage:
        return Usage(prompt_tokens=self.prompt, completion_tokens=self.new, total_tokens=self.prompt + self.new)


async def _events(
    exchange: Exchange, reply: Reply, counted: _Counted, include_usage: bool, request: Request
) -> AsyncIterator[str]:
    """Server-sent events; an error in their midst is one of them."""
    request.state.outcome = "cancelled"  # unless it comes to an end
    try:
        async for piece in exchange.pieces():
            counted.new += piece.count
            for chunk in reply.chunks(piece):
                yield f"data: {chunk.model_dump_json()}\n\n"
        request.state.outcome = "ok"
        if include_usage:
            yield f"data: {reply.usage(counted.usage()).model_dump_json()}\n\n"
        yield "data: [DONE]\n\n"
    except ClientGone:
        pass
    except ApiError as error:
        request.state.outcome = "shutting_down" if error.status == 503 else "failed"
        yield f"data: {json.dumps(error.body())}\n\n"
        yield "data: [DONE]\n\n"


class _EventStream(StreamingResponse):
    """Ends the exchange, which alone reads whether the client has gone."""

    def __init__(self, events: AsyncIterator[str], exchange: Exchange) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.stream_response(send)
        finally:
            self._exchange.close()


def _sampling(body: ChatRequest | CompletionRequest, top_logprobs: int | None) -> Sampling:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return Sampling(body.temperature, body.top_p, body.seed, stop, top_logprobs)


def _chat_logprobs(body: ChatRequest) -> int | None:
    if body.logprobs:
        return body.top_logprobs or 0
    if body.top_logprobs:
        raise ApiError(400, "top_logprobs needs logprobs", param="top_logprobs")
    return None


def _one_of(new: int | None, old: int | None) -> int | None:
    if new is not None and old is not None and new != old:
        raise ApiError(400, "max_tokens is the old name of max_completion_tokens; give one", param="max_tokens")
    return old if new is None else new


def _check_model(service: Service, name: str) -> None:
    if name != service.name:
        raise ApiError(
            404,
            f"there is no model {name[:200]!r}; this server has {service.name!r}",
            param="model",
            code="model_not_found",
        )


def _card(service: Service) -> ModelCard:
    return ModelCard(id=service.name, created=service.created, max_model_len=service.limits.max_model_len)


def _only(*statuses: int) -> dict[int | str, dict[str, Any]]:
    return {status: _ERRORS[status] for status in statuses}


def _answer_errors(app: FastAPI) -> None:
    """Every error has the shape of OpenAI's."""

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> Response:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return error_response(_of_validation(error))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        return error_response(ApiError(error.status_code, error.detail, headers=dict(error.headers or {})))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> Response:
        return error_response(ApiError(500, f"internal error: {type(error).__name__}", code="internal_error"))


def _of_validation(error: RequestValidationError) -> ApiError:
    """In one line, of the first parameter that is wrong; a parameter of several types has a reason for each of them."""
    problems = error.errors()
    first = problems[0]
    place = [str(part) for part in first["loc"][1:]]
    if first["type"] == "json_invalid":
        return ApiError(400, "the body is not valid JSON")
    if not place and first["type"] == "string_unicode":
        return ApiError(400, "the body has a name that is no text: half of a surrogate pair")
    if not place:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        name = ".".join(place)[:100]
        return ApiError(400, f"this server does not support the parameter {name!r}", param=name, code="unsupported")
    own = [problem for problem in problems if str(problem["loc"][1:2]) == str(first["loc"][1:2])]
    # What this server says itself is clearer than a list of types that would have been right.
    own = [problem for problem in own if problem["type"] == "value_error"][:1] or own
    reasons = [problem["msg"].removeprefix("Value error, ") for problem in own]
    name = ".".join(place) if len(reasons) == 1 else place[0]
    return ApiError(400, f"{name[:100]}: {'; or: '.join(dict.fromkeys(reasons[:4]))[:400]}", param=place[0][:100])


def _describe(app: FastAPI) -> None:
    """FastAPI documents 422 for wrong bodies, which are answered with 400 here."""
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)
