"""Serves the page at `/` and its files, which say nothing of the server: anybody may have them."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from cluster.coordinator.idle import MEANINGS
from cluster.records import frozen
from deployments.ingress.ingress import Ingress

Handler = Callable[[Request], Awaitable[Response]]

_INDEX = "index.html"
_TYPES = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".json": "application/json",
    ".svg": "image/svg+xml",
}
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


@frozen
class Asset:
    """One file, as it is sent."""

    body: bytes
    compressed: bytes
    media_type: str
    tag: str

    def response(self, request: Request, **headers: str) -> Response:
        """Return it, or that the browser has it."""
        told = {**_HEADERS, "ETag": self.tag, "Vary": "Accept-Encoding", **headers}
        if request.headers.get("if-none-match") == self.tag:
            return Response(status_code=304, headers=told)
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(self.body, media_type=self.media_type, headers=told)
        told["Content-Encoding"] = "gzip"
        return Response(self.compressed, media_type=self.media_type, headers=told)


def assets() -> dict[str, Asset]:
    """Return every file that browsers get, by its path below `static`."""
    found, root = dict[str, Asset](), Path(__file__).parent / "static"
    for path in root.rglob("*"):
        if media_type := _TYPES.get(path.suffix):
            body = path.read_bytes()
            tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
            name = path.relative_to(root).as_posix()
            found[name] = Asset(body, gzip.compress(body, mtime=0), media_type, tag)
    return found


class PageFiles:
    """Answers browsers with the page, and with what the page asks for."""

    def __init__(self) -> None:
        self._assets = assets()

    def before(self, otherwise: Handler) -> Handler:
        """Return the endpoint of `/`: the page for who asks for HTML by name, as browsers do."""

        async def front(request: Request) -> Response:
            if wants_html(request.headers.get("accept", "")):
                return self._assets[_INDEX].response(request, Vary="Accept, Accept-Encoding")
            return await otherwise(request)

        return front

    def route(self) -> Route:
        """Return the route of the files."""

        async def file(request: Request) -> Response:
            asset = self._assets.get(request.path_params["name"])
            return Response(status_code=404) if asset is None else asset.response(request)

        return Route("/ui/static/{name:path}", file, methods=["GET"])


def about(ingress: Ingress, version: str) -> Handler:
    """Return the endpoint that tells the page whom it talks to."""

    async def tell(request: Request) -> Response:
        config = ingress.config
        return JSONResponse(
            {
                "version": version,
                "model": config.model_name,
                "models": ingress.limits.model_names,
                "drafters": {name: config.drafters[name].kind for name in config.on_their_own},
                "tasks": config.tasks,
                "max_model_len": ingress.coordinators.max_context_len or None,
                "idle_because": dict(MEANINGS),
            }
        )

    return tell


def wants_html(accept: str) -> bool:
    """True if an Accept header names HTML."""
    kinds = [part.replace(" ", "").lower().split(";") for part in accept.split(",")]
    return any(kind[0] == "text/html" and "q=0" not in kind[1:] for kind in kinds)
