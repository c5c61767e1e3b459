"""One request in the event loop: it waits for pieces, and notices when its client goes away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress

from starlette.types import Receive

from stageprune.serving.transformers.jobs import End, Job, Piece, Row, Sampling
from stageprune.serving.transformers.worker import Worker


class ClientGone(Exception):
    """Nobody waits for the answer any more."""


class Exchange:
    """Hands a job to the worker, and its pieces to one reader. Must be closed.

    However slowly the pieces are read, the worker does not wait; they are as many as the request may have tokens.

    Args:
        worker: in which a place is reserved for the job.
        rows: the answers to generate.
        sampling: how to choose tokens.
        receive: of ASGI, after the request's body: only that the client goes away can follow.

    Raises:
        ApiError: if the server is shutting down.
    """

    def __init__(self, worker: Worker, rows: Sequence[Row], sampling: Sampling, receive: Receive) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Piece | End] = asyncio.Queue()
        self._first: Piece | End | None = None
        self._worker = worker
        self._job = Job(rows, sampling, self._deliver)
        worker.submit(self._job)
        self._watch = asyncio.create_task(self._cancel_when_gone(receive))

    async def begin(self) -> None:
        """Wait until there is something to tell: before that, errors are still responses of their own.

        Raises:
            ApiError: if the request failed.
            ClientGone: if nobody waits any more.
        """
        self._first = await self._events.get()
        if isinstance(self._first, End):
            _raise(self._first)

    async def pieces(self) -> AsyncIterator[Piece]:
        """What the worker tells; raises as `begin`."""
        if self._first is None:
            await self.begin()
        event = self._first
        while isinstance(event, Piece):
            yield event
            event = await self._events.get()
        if isinstance(event, End):
            _raise(event)

    def close(self) -> None:
        """The reader has read all, or gives up."""
        self._watch.cancel()
        self._worker.cancel(self._job)

    def _deliver(self, event: Piece | End) -> None:
        with suppress(RuntimeError):  # the loop is closed: the server was stopped by force
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    async def _cancel_when_gone(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._worker.cancel(self._job)


def _raise(end: End) -> None:
    if end.error is not None:
        raise end.error
    if end.cancelled:
        raise ClientGone
