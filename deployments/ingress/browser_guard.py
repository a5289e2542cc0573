"""Refuses what pages of other sites make a browser send here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from cluster.config.addresses import is_loopback
from cluster.config.http import HttpConfig
from cluster.errors import ForbiddenError
from deployments.ingress.openai_error import error_response
from deployments.ingress.request_scope import request_id_of

# What an origin leaves out.
_PORTS = {"http": ":80", "https": ":443"}
_READING = ("GET", "HEAD", "OPTIONS")


class BrowserGuard:
    """Two things that the browser's own rules let through.

    A page whose name comes to lead to loopback (DNS rebinding) is of the same origin as a server
    there, so such a server answers under loopback's names and `http.host_names` only.  And a page
    needs nobody's leave to send a form, so what another site sends is refused unless
    `api.cors_origins` has it.  Which site that is says Sec-Fetch-Site; a browser that sends none
    is known by its Origin, which is another than the Host that it asks.
    """

    def __init__(self, app: ASGIApp, where: HttpConfig, origins: Sequence[str]) -> None:
        self._app = app
        self._where = where
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else ""
        if not refusal:
            await self._app(scope, receive, send)
            return
        answer = error_response(ForbiddenError(refusal), request_id_of(Request(scope)))
        await answer(scope, receive, send)

    def _refusal(self, scope: Scope) -> str:
        """Return why a request is not answered; "" for one that is."""
        headers = Headers(scope=scope)
        if self._where.is_local and not self._is_ours(headers):
            return (
                "this server answers requests to 127.0.0.1, [::1] and localhost; send them there, "
                "or add the name of the header Host to http.host_names"
            )
        if scope["method"] not in _READING and self._is_foreign(headers):
            return (
                "a page of another site sent this; add its origin to api.cors_origins if it may "
                "call the API"
            )
        return ""

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
