"""Serves the page at `/` and its files, which say nothing of the server: anybody may have them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

Handler = Callable[[Request], Awaitable[Response]]

STATIC = Path(__file__).parent / "static"
# Scripts and styles are files of ours, and texts become HTML by a policy of Trusted Types only.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    # A newer server's modules must not meet an older one's.
    "Cache-Control": "no-cache",
}


class PageFiles(StaticFiles):
    """Answers browsers with the page, and with what the page asks for."""

    def __init__(self) -> None:
        super().__init__(directory=STATIC)

    def get_path(self, scope: Scope) -> str:
        """The path of a file below `STATIC`."""
        return str(scope["path_params"]["name"])

    def file_response(self, *args: Any, **options: Any) -> Response:
        """A file, or that the browser has it."""
        response = super().file_response(*args, **options)
        response.headers.update(_HEADERS)
        return response

    def before(self, otherwise: Handler) -> Handler:
        """Return the endpoint of `/`: the page for who asks for HTML by name, as browsers do."""

        async def front(request: Request) -> Any:
            if not wants_html(request.headers.get("accept", "")):
                return await otherwise(request)
            page = await self.get_response("index.html", request.scope)
            page.headers["Vary"] = "Accept"
            return GZipMiddleware(page)

        return front

    def route(self) -> Route:
        """Return the route of the files."""
        compressed = [Middleware(GZipMiddleware)]
        return Route("/ui/static/{name:path}", self, methods=["GET"], middleware=compressed)


def wants_html(accept: str) -> bool:
    """True if an Accept header names HTML."""
    kinds = [part.replace(" ", "").lower().split(";") for part in accept.split(",")]
    return any(kind[0] == "text/html" and "q=0" not in kind[1:] for kind in kinds)
