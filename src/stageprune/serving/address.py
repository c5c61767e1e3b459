"""Where a server listens."""

from __future__ import annotations

import socket

from stageprune.errors import ServingError


def bind(host: str, port: int) -> socket.socket:
    """Take an address before a model is loaded; connections are refused until the server runs.

    Args:
        host: a name or an address.
        port: 0: any that is free.

    Raises:
        ServingError: if the address is not there, or taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
        except BaseException:
            sock.close()
            raise
    except (OSError, UnicodeError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ServingError(f"cannot listen on {host!r}, port {port}: {reason}; choose others") from error
    return sock


def url(sock: socket.socket) -> str:
    """Where clients find the server, such as `http://127.0.0.1:8000/v1`."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if sock.family == socket.AF_INET6 else f"http://{host}:{port}/v1"
