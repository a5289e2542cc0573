"""What `/` answers: in ten lines what this is, which model it serves, and where."""

from __future__ import annotations

import html

from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from deployments.ingress.api.endpoints import ENDPOINTS, PAGES
from deployments.ingress.spec import Limits

# An adapter is a name as well, and there may be many.
_MAX_NAMES = 8
_WIDTH = max(len(endpoint.path) for endpoint in ENDPOINTS)


def front_page(request: Request, limits: Limits, version: str) -> Response:
    """As HTML for who asks for that by name, as browsers do; as text for all others."""
    headers = {"Vary": "Accept"}
    if _wants_html(request.headers.get("accept", "")):
        return HTMLResponse(_html(limits, version), headers=headers)
    return PlainTextResponse(_text(limits, version), headers=headers)


def _wants_html(accept: str) -> bool:
    kinds = [part.replace(" ", "").lower().split(";") for part in accept.split(",")]
    return any(kind[0] == "text/html" and "q=0" not in kind[1:] for kind in kinds)


def _what(version: str) -> str:
    return f"Drafthouse {version} serves a language model: drafters guess ahead, the model decides."


def _model(limits: Limits) -> str:
    names = limits.model_names
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"Model: {', '.join(names[:_MAX_NAMES])}{more}"


def _gets() -> list[str]:
    """Pages that can be opened as they are."""
    return [
        page.path
        for page in PAGES
        if page.method == "get" and "{" not in page.path and page.path not in ("/", "/docs")
    ]


def _text(limits: Limits, version: str) -> str:
    posts = [f"POST {one.path.ljust(_WIDTH)}  {one.summary}" for one in ENDPOINTS]
    lines = [_what(version), _model(limits), *posts, f"GET  {' '.join(_gets())}"]
    return "\n".join(lines) + "\n"


def _html(limits: Limits, version: str) -> str:
    posts = "\n".join(
        f"<li><code>POST {one.path}</code> {html.escape(one.summary)}</li>" for one in ENDPOINTS
    )
    links = " ".join(f'<a href="{path}">{path}</a>' for path in _gets())
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Drafthouse</title>\n'
        f"<h1>Drafthouse</h1>\n<p>{html.escape(_what(version))}</p>\n"
        f"<p>{html.escape(_model(limits))}</p>\n<ul>\n{posts}\n"
        f"<li>GET {links}</li>\n</ul>\n</html>\n"
    )
