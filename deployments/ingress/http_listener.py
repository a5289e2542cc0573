"""Serves the HTTP API on a port of the ingress' own, by connections with bounds on what a client
may send before a request, and how slowly.

Through Ray Serve's proxy every piece of a stream would pass through two more processes' event loops
and Ray's object store.
All replicas on a node share the port, and the kernel distributes connections over them.
"""

from __future__ import annotations

import asyncio
import contextlib
import http
import math
import socket
import ssl
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from typing import Any

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from cluster.config.doors import HttpConfig, joined
from cluster.config.pem import Pem, Reloaded
from cluster.errors import (
    ConfigError,
    DrafthouseError,
    HeadTooLargeError,
    RequestError,
    TooSlowError,
    UnavailableError,
    WorkerError,
)
from deployments.ingress.body import error_response

# Of each header beside its name and value: a colon, a space, the end of the line.
_SYNTAX_BYTES = 4


class BoundedProtocol(HttpToolsProtocol):
    """One connection.

    uvicorn's protocol bounds nothing: it waits for ever for a first byte or for the end of a head,
    and keeps however much of one comes.  Bodies are bounded where they are read (`body`).
    Nor does it understand clients of HTTP/1.0, to whom it sends chunks, and those who offer to
    speak another protocol (h2c), which it takes for the end of the request.
    """

    def __init__(
        self,
        bounds: HttpConfig,
        waiting: dict[BoundedProtocol, None],
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """waiting: the listener's connections without a request, the longest-waiting first."""
        super().__init__(config, server_state, app_state, _loop)
        self._bounds = bounds
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = False
        self._num_bytes = 0  # of path and headers
        # Bytes that came since the parser last told of any: it collects a header until that ends.
        self._num_untold = 0
        self._without_offer = b""  # the head of a request that offered to speak otherwise
        self._answered: RequestResponseCycle | None = None  # `cycle` is the newest

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._waiting[self] = None
        self._start_clock()
        limit = self._bounds.max_connections
        if len(self.connections) > limit:
            next(iter(self._waiting))._end(
                UnavailableError(f"{limit} connections are open; try again later")
            )

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._waiting.pop(self, None)
        self._stop_clock()
        self._leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        # The first byte starts the clock and a whole head stops it, whatever comes in between:
        # line breaks before a request, or the rest of a body that nobody waits for any more.
        if self._timer is None and not self._is_answering:
            self._start_clock()
        self._num_untold += len(data)
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                break
            except httptools.HttpParserUpgrade as offer:
                # A server may ignore it (RFC 9110, 7.8); what comes next is still the body, also
                # where the connection is to close then, after which a parser reads no more.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                head, self._without_offer = self._without_offer, b""
                data = head + data[offer.args[0] :]
            except httptools.HttpParserError as error:
                # What a method below has raised is the context of the parser's own error.
                refusal = error.__context__
                if not isinstance(refusal, HeadTooLargeError):
                    refusal = RequestError("the request is not valid HTTP/1.1; correct it")
                self._end(refusal)
                break
        if self._num_untold > self._bounds.max_header_bytes and not self.transport.is_closing():
            self._end(HeadTooLargeError("a header does not end; send a shorter one"))

    def on_message_begin(self) -> None:
        """See httptools."""
        super().on_message_begin()
        self._is_in_head, self._num_bytes = True, 0

    def on_url(self, url: bytes) -> None:
        """See httptools."""
        super().on_url(url)
        self._add(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        """See httptools; called for those behind a body, too."""
        super().on_header(name, value)
        self._add(len(name) + len(value) + _SYNTAX_BYTES)

    def on_body(self, body: bytes) -> None:
        """See httptools."""
        self._num_untold = 0
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """See httptools."""
        method = self.parser.get_method()
        if self.parser.should_upgrade() and method != b"CONNECT":
            version = self.parser.get_http_version().encode()
            lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
            lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
            self._without_offer = b"\r\n".join([*lines, b"", b""])
            return
        self._is_in_head = False
        self._num_untold = 0
        self._stop_clock()
        self._waiting.pop(self, None)
        super().on_headers_complete()
        if len(self.pipeline) == 1:
            # It waits, which costs little; unless something is read, nobody sees a client leave.
            self.flow.resume_reading()

    def on_message_complete(self) -> None:
        """See httptools."""
        if not self._without_offer:
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answered = cycle
        if cycle.scope["http_version"] < "1.1":
            cycle.keep_alive = cycle.waiting_for_100_continue = cycle.chunked_encoding = False
            app = partial(_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_response_complete(self) -> None:
        """Called by uvicorn."""
        super().on_response_complete()
        if not self._is_answering:  # no other request has come meanwhile
            self._waiting[self] = None

    def _add(self, num_bytes: int) -> None:
        self._num_untold = 0
        self._num_bytes += num_bytes
        bounds = self._bounds
        if self._num_bytes > bounds.max_header_bytes:
            raise HeadTooLargeError(
                f"path and headers have more than {bounds.max_header_bytes} bytes; send less, or "
                "raise http.max_header_bytes"
            )
        if len(self.headers) > bounds.max_headers:
            raise HeadTooLargeError(
                f"there are more than {bounds.max_headers} headers; send fewer, or raise "
                "http.max_headers"
            )

    def _start_clock(self) -> None:
        self._timer = self.loop.call_later(self._bounds.head_timeout_s, self._on_late)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_late(self) -> None:
        self._end(
            TooSlowError(
                f"the path and headers have not arrived within {self._bounds.head_timeout_s:g} s; "
                "send them faster, or raise http.head_timeout_s"
            )
        )

    def _end(self, error: DrafthouseError) -> None:
        """Close the connection; tell a client that asks for the first time, or is about to ask."""
        self._waiting.pop(self, None)  # it is not lost before the next turn of the loop
        if self._is_answering and not (
            self._is_in_head or self.pipeline or self.cycle.response_started
        ):
            self._leave()  # the body is at fault
        elif self._is_answering or (self.cycle is not None and not self._is_in_head):
            self.transport.abort()
            return
        response = error_response(error, uuid.uuid4().hex)
        phrase = http.HTTPStatus(response.status_code).phrase
        lines = [f"HTTP/1.1 {response.status_code} {phrase}".encode()]
        lines += [name + b": " + value for name, value in response.raw_headers]
        lines += [b"connection: close", b"", bytes(response.body)]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _leave(self) -> None:
        """Tell what answers that the client is gone."""
        if self._answered is not None:
            self._answered.disconnected = True
            self._answered.message_event.set()


async def _without_chunks(
    app: ASGIApp, cycle: RequestResponseCycle, scope: Scope, receive: Receive, send: Send
) -> None:
    """Answer a client of HTTP/1.0: the end of the connection is that of the answer."""

    async def send_plainly(message: Message) -> None:
        # uvicorn counts down what is left of a length, and looks at it at the end.
        is_last = not message.get("more_body")
        cycle.expected_content_length = len(message.get("body", b"")) if is_last else sys.maxsize
        await send(message)

    await app(scope, receive, send_plainly)


class _Renewed(ssl.SSLContext):
    """A connection gets the certificate that the files hold when it begins.

    A callback for the client's host name would write a traceback for each that is no ASCII."""

    pem: Reloaded[Pem]

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return self.pem.get().context.wrap_bio(*args, **options)


def _renewed(pem: Reloaded[Pem], *_: Any) -> ssl.SSLContext:
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
                ssl_context_factory=None if tls is None else partial(_renewed, tls),
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
