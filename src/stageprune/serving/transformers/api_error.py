"""An error as OpenAI's API reports it."""

from __future__ import annotations

from typing import Any

_TYPES = {401: "authentication_error", 429: "rate_limit_error", 500: "server_error", 503: "server_error"}


class ApiError(Exception):
    """What becomes of a request that is not answered.

    Attributes:
        status: of HTTP.
        message: for the user.
        param: the parameter of the request that is wrong, if it is one.
        code: for programs.
        headers: of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """`{"error": {"message", "type", "param", "code"}}`."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def shutting_down() -> ApiError:
    """For requests that a stopping server does not answer any more."""
    return ApiError(503, "the server is shutting down", code="shutting_down")
