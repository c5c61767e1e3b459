"""Listen, serve, and stop in good order when a signal says so."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn
from fastapi import FastAPI

from stageprune.serving.transformers.app import build_app
from stageprune.serving.transformers.service import Service

_LINGER_S = 2  # for responses after the running request was cut


class Server(uvicorn.Server):
    """uvicorn, which tells the worker to stop before it waits for the open requests.

    Args:
        service: what is served.
        app: its application; None: `build_app(service)`.
        started: called when requests are accepted.
    """

    def __init__(
        self, service: Service, app: FastAPI | None = None, started: Callable[[], None] = lambda: None
    ) -> None:
        config = uvicorn.Config(
            app or build_app(service),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=int(service.limits.grace_s) + _LINGER_S,
        )
        super().__init__(config)
        self._service = service
        self._tell_started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Fail what waits, give what runs its grace, and close all connections."""
        self._service.worker.close(self._service.limits.grace_s)
        await asyncio.sleep(0)  # the failed ones hear of it
        await super().shutdown(sockets)


def serve(service: Service, sock: socket.socket, started: Callable[[], None]) -> bool:
    """Serve until SIGINT or SIGTERM.

    Args:
        service: what is served.
        sock: as `bind` gave it.
        started: called when requests are accepted.

    Returns:
        Whether the worker's thread has ended; False: it is deep in a forward pass, and the process must not wait.
    """
    server = Server(service, started=started)

    def stop(*_: object) -> None:
        server.should_exit = True

    # uvicorn handles signals while it runs, and raises them once more afterwards: the default would end the process
    # with their exit code.
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        server.run(sockets=[sock])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        service.worker.close(0)
        sock.close()
    return service.worker.join(_LINGER_S)
