"""Serves the HTTP API on a port of the ingress' own.

Through Ray Serve's proxy every piece of a stream would pass through two more processes' event loops
and Ray's object store.
All replicas on a node share the port, and the kernel distributes connections over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from cluster.config.addresses import joined
from cluster.config.pem import Pem, Reloaded
from cluster.config.schema import HttpConfig
from cluster.errors import ConfigError, WorkerError
from deployments.ingress.http_protocol import BoundedProtocol


class _Renewed(ssl.SSLContext):
    """A connection gets the certificate that the files hold when it begins.

    A callback for the client's host name would write a traceback for each that is no ASCII."""

    pem: Reloaded[Pem]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.pem.get().context.wrap_bio(*args, **options)


def _renewed(pem: Reloaded[Pem]) -> ssl.SSLContext:
    context = _Renewed(ssl.PROTOCOL_TLS_SERVER)
    context.pem = pem
    return context


# Connections that have not been accepted yet; as uvicorn's own default.
_BACKLOG = 2048


class HttpListener:
    """A server that listens from `start` to `stop`."""

    def __init__(
        self, app: ASGIApp, where: HttpConfig, patience_s: float, tls: Reloaded[Pem] | None = None
    ) -> None:
        """patience_s: how long `stop` waits for answers that are under way."""
        self._where = where
        self._server = _Server(
            uvicorn.Config(
                app,
                ssl_context_factory=None if tls is None else lambda *_: _renewed(tls),
                lifespan="off",
                ws="none",
                log_config=None,
                log_level="critical",  # a line for each malformed request could fill a disk
                access_log=False,
                server_header=False,
                proxy_headers=False,
                http=partial(BoundedProtocol, where, {}),  # type: ignore[arg-type]  # makes one
                timeout_keep_alive=where.keep_alive_s,
                timeout_graceful_shutdown=math.ceil(patience_s),
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Take connections from now on; raises ConfigError if the address cannot be bound."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[_bound(self._where)]))

    def check(self) -> None:
        """Raise WorkerError where it does not serve any more."""
        if self._serving is not None and self._serving.done():
            raise WorkerError("the ingress' HTTP server has ended")

    async def stop(self) -> None:
        """Refuse new connections, give answers time to end, then break them."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the replica's."""
        yield


def _bound(where: HttpConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    # asyncio sends small answers at once only where the socket says that it is of TCP.
    bound = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # Connections have it from here.  Nothing else notices a client that stays and never reads:
        # its answer's end waits in the socket's buffer.
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = 1000 * where.unread_timeout_s
            bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        bound.bind((where.host, where.port))
        bound.listen(_BACKLOG)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise ConfigError.at(
            "http",
            f"{joined(where.host, where.port)} cannot be bound on this node "
            f"({error.strerror}); choose another host or port",
        ) from error
    return bound
