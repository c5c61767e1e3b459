"""What happens around every request: its outcome is counted, its key checked, its body read within limits."""

from __future__ import annotations

import asyncio
import hmac
import json

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stageprune.serving.transformers.api_error import ApiError
from stageprune.serving.transformers.limits import Limits
from stageprune.serving.transformers.metrics import Metrics

COMPLETIONS = ("/v1/chat/completions", "/v1/completions")

_OUTCOMES = {
    200: "ok",
    401: "unauthorized",
    404: "unknown_model",
    408: "slow_body",
    413: "too_large",
    429: "queue_full",
    500: "failed",
    503: "shutting_down",
}


def error_response(error: ApiError) -> Response:
    """What the client gets; in ASCII, as messages quote what clients send."""
    return Response(json.dumps(error.body()), error.status, error.headers, media_type="application/json")


class CountOutcomes:
    """Counts each request for completions once: by `scope["state"]["outcome"]` if that is set, else by its status."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http" or scope["path"] not in COMPLETIONS or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        outcome = "cancelled"  # no response at all: the client went away

        async def watched(message: Message) -> None:
            nonlocal outcome
            if message["type"] == "http.response.start":
                outcome = _OUTCOMES.get(message["status"], "invalid")
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            outcome = "failed"
            raise
        finally:
            self._metrics.requests.labels(state.get("outcome", outcome)).inc()


class CheckKey:
    """Refuses requests without the key, except for /health."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] == "http" and scope["path"] != "/health" and not self._given(scope):
            error = ApiError(
                401,
                "wrong or missing API key; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _given(self, scope: Scope) -> bool:
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(key.strip(), self._key)


class ReadBody:
    """Reads bodies before anything else does, within the limits of size and time."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As ASGI says."""
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)
            return
        try:
            body = await asyncio.wait_for(self._read(receive), self._limits.body_s)
        except TimeoutError:
            error = ApiError(408, f"the request's body did not arrive within {self._limits.body_s:g} seconds")
            await error_response(error)(scope, receive, send)
            return
        except ApiError as error:
            await error_response(error)(scope, receive, send)
            return
        if body is not None:
            await self._app(scope, _replay(body, receive), send)

    async def _read(self, receive: Receive) -> bytes | None:
        """None if the client went away."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            # Read on for a while, and forget it: a client that is still sending would not see the answer.
            if size <= self._limits.max_body:
                parts.append(part)
            if not message.get("more_body", False) or size > 4 * self._limits.max_body:
                break
        if size > self._limits.max_body:
            raise ApiError(413, f"the request's body is larger than {self._limits.max_body} bytes", code="too_large")
        return b"".join(parts)


def _replay(body: bytes, receive: Receive) -> Receive:
    given = False

    async def replayed() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replayed
