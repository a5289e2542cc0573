"""What every HTTP request passes before any endpoint: an id, clean headers, a line of the log, and
a guard against what pages of other sites make a browser send."""

from __future__ import annotations

import logging
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cluster import logs
from cluster.config.doors import HttpConfig, is_loopback
from cluster.errors import ForbiddenError, RequestError
from cluster.logs import UNKNOWN
from cluster.records import record
from deployments.ingress.body import error_response

log = logging.getLogger(__name__)

REQUEST_ID = "X-Request-Id"
# It goes into headers, logs and JSON as it is.
_GOOD_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
TIMEOUT = "X-Request-Timeout-Ms"
_GOOD_TIMEOUT = re.compile(r"[0-9]{1,12}")
_WHITE_SPACE = b" \t"
# Asked every few seconds, by machines.  Load balancers have no key; the others tell others than
# operators little or nothing.
SILENT = ("/health", "/-/healthz", "/metrics", "/ping", "/stats")


@record
class RequestScope:
    """Takes the client's X-Request-Id, or makes one, and answers with it; logs how it ended.

    check: raises RequestError for what is not answered."""

    _app: ASGIApp
    is_logged: bool
    check: Callable[[Scope], None] = lambda scope: None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # RFC 9110, 5.5: white space around a value is no part of it; not every server takes it off.
        headers = [(name, value.strip(_WHITE_SPACE)) for name, value in scope["headers"]]
        scope = {**scope, "headers": headers}
        sent = Headers(raw=headers)
        request_id = sent.get(REQUEST_ID, "")
        if not _GOOD_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
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
            _check_coding(sent.getlist("transfer-encoding"), scope)
            self.check(scope)
            await self._app(scope, receive, send_with_id)
        except RequestError as error:
            await error_response(error, request_id)(scope, receive, send_with_id)
        finally:
            if self.is_logged and scope["path"] not in SILENT:
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


def _check_coding(sent: Sequence[str], scope: Scope) -> None:
    """Raise RequestError for a body in another coding than chunks: servers take off these alone."""
    if sent and (
        [coding.lower() for coding in sent] != ["chunked"] or scope["http_version"] < "1.1"
    ):
        raise RequestError(
            "Transfer-Encoding: a body comes in chunks (`chunked`, by HTTP/1.1) or with a "
            "Content-Length; say how it is compressed by Content-Encoding"
        )


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


# What an origin leaves out.
_PORTS = {"http": ":80", "https": ":443"}
_READING = ("GET", "HEAD", "OPTIONS")


@record
class BrowserGuard:
    """Two things that the browser's own rules let through.

    A page whose name comes to lead to loopback (DNS rebinding) is of the same origin as a server
    there, so such a server answers under loopback's names and `http.host_names` only.  And a page
    needs nobody's leave to send a form, so what another site sends is refused unless
    `api.cors_origins` has it.  Which site that is says Sec-Fetch-Site; a browser that sends none
    is known by its Origin, which is another than the Host that it asks.
    """

    _where: HttpConfig
    _origins: Sequence[str]

    def check(self, scope: Scope) -> None:
        """Raise ForbiddenError for what is not answered."""
        headers = Headers(scope=scope)
        if self._where.is_local and not self._is_ours(headers):
            raise ForbiddenError(
                "this server answers requests to 127.0.0.1, [::1] and localhost; send them there, "
                "or add the name of the header Host to http.host_names"
            )
        if scope["method"] not in _READING and self._is_foreign(headers):
            raise ForbiddenError(
                "a page of another site sent this; add its origin to api.cors_origins if it may "
                "call the API"
            )

    def _is_ours(self, headers: Mapping[str, str]) -> bool:
        # Only programs send none.
        host = headers.get("host", "localhost")
        name = host.rpartition(":")[0] if not host.endswith("]") and ":" in host else host
        return is_loopback(name.strip("[]").lower()) or name in self._where.host_names

    def _is_foreign(self, headers: Mapping[str, str]) -> bool:
        site, origin = headers.get("sec-fetch-site"), headers.get("origin", "")
        if {"*", origin} & set(self._origins):
            return False
        if site is not None or not origin:
            return site == "cross-site"
        # Older browsers say no more, nor does any to an http:// address of another machine.
        scheme, _, where = origin.lower().partition("://")
        port = _PORTS.get(scheme)
        # No page of another site sets the second one; a proxy does.
        asked = f"{headers.get('host', '')},{headers.get('x-forwarded-host', '')}".lower()
        hosts = [host.strip().removesuffix(port) for host in asked.split(",")] if port else []
        return not where or where.removesuffix(port or "") not in hosts
