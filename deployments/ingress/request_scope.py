"""What every HTTP request gets before any endpoint sees it: an id, clean headers, a log line."""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import logs
from cluster.config.http import HttpConfig
from cluster.errors import RequestError
from cluster.logs import UNKNOWN
from deployments.ingress.http_protocol import check_head, size_of
from deployments.ingress.openai_error import error_response

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
_REQUEST_ID = REQUEST_ID.lower().encode()
# It goes into headers, logs and JSON as it is.
_GOOD_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
TIMEOUT = "X-Request-Timeout-Ms"
SEGMENT = "X-Drafthouse-Segment"
_GOOD_TIMEOUT = re.compile(r"[0-9]{1,12}")
_WHITE_SPACE = b" \t"
# Asked every few seconds, by machines.
_SILENT = ("/health", "/metrics", "/ping", "/stats")


class RequestScope:
    """Takes the client's X-Request-Id, or makes one, and answers with it; logs how it ended.

    Refuses heads beyond the bounds: Serve's proxies do not.
    """

    def __init__(self, app: ASGIApp, bounds: HttpConfig, *, is_logged: bool) -> None:
        self._app = app
        self._bounds = bounds
        self._is_logged = is_logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # RFC 9110, 5.5: white space around a value is no part of it; not every server takes it off.
        headers = [(name, value.strip(_WHITE_SPACE)) for name, value in scope["headers"]]
        scope = {**scope, "headers": headers}
        request_id = _id_in(scope) or uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        named = logs.REQUEST_ID.set(request_id)
        started_at, status = time.monotonic(), 0

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            await send(message)

        try:
            head_bytes = len(scope["path"]) + len(scope["query_string"])
            head_bytes += sum(size_of(name, value) for name, value in headers)
            check_head(head_bytes, len(headers), self._bounds)
            _check_coding(scope)
            await self._app(scope, receive, send_with_id)
        except RequestError as error:
            await error_response(error, request_id)(scope, receive, send_with_id)
        finally:
            if self._is_logged and scope["path"] not in _SILENT:
                # Of the path only what the application itself knows: the rest is a client's text.
                caller = scope["state"].get("caller")
                log.info(
                    "http id=%(id)s method=%(method)s path=%(path)s status=%(status)s "
                    "total_ms=%(total_ms)d key=%(key)s",
                    {
                        "id": request_id,
                        "method": scope["method"] if scope["method"].isalpha() else "?",
                        "path": scope["state"].get("route", "?"),
                        "status": status or UNKNOWN,
                        "total_ms": round(1000.0 * (time.monotonic() - started_at)),
                        "key": (caller and caller.name) or UNKNOWN,
                    },
                )
            logs.REQUEST_ID.reset(named)


def _check_coding(scope: Scope) -> None:
    """Raise RequestError for a body in another coding than chunks: servers take off these alone."""
    sent = [value.lower() for name, value in scope["headers"] if name == b"transfer-encoding"]
    if sent and (sent != [b"chunked"] or scope["http_version"] < "1.1"):
        raise RequestError(
            "Transfer-Encoding: a body comes in chunks (`chunked`, by HTTP/1.1) or with a "
            "Content-Length; say how it is compressed by Content-Encoding"
        )


def _id_in(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == _REQUEST_ID:
            return value.decode() if _GOOD_ID.fullmatch(value) else None
    return None


def request_id_of(request: Request) -> str:
    return str(request.state.request_id)


def timeout_of(request: Request) -> float | None:
    """Seconds that the client allows for the answer; raises RequestError for no such number."""
    value = request.headers.get(TIMEOUT)
    if value is None:
        return None
    if not _GOOD_TIMEOUT.fullmatch(value) or int(value) == 0:
        raise RequestError(
            f"{TIMEOUT}: {value[:20]!r} is no number of milliseconds; send 1 or more, as digits",
            param=TIMEOUT.lower(),
        )
    return int(value) / 1000.0
