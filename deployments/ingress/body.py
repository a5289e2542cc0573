"""Reads the body of a request as one JSON object, within limits and without blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from cluster.config.schema import IngressConfig
from cluster.errors import RequestError, TooSlowError
from cluster.text.json_text import parse_json
from deployments.ingress.content_coding import codings_of, too_large, unpack
from deployments.ingress.fields import json_kind

T = TypeVar("T")

# Parsing this much takes about a millisecond; larger bodies are parsed in another thread.
_INLINE_BYTES = 128 * 1024


async def read_object(
    request: Request, settings: IngressConfig, parse: Callable[[dict[str, Any]], T]
) -> T:
    """Read the JSON object in the body of `request` and return the result of `parse`.

    Raises UnsupportedCodingError before it reads, TooLargeError before it reads or unpacks beyond
    the limit, TooSlowError if the body does not arrive in time, RequestError if the body is not a
    JSON object.
    """
    limit = settings.max_body_bytes
    codings = codings_of(request.headers.getlist("content-encoding"))
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, limit)
    except TimeoutError:
        raise TooSlowError(
            f"the body has not arrived within {settings.body_timeout_s:g} s; send it faster or "
            "raise ingress.body_timeout_s"
        ) from None

    def parsed() -> T:
        return parse(parse_body(unpack(body, codings, limit)))

    # Nobody knows how much a compressed one is.
    is_short = len(body) <= _INLINE_BYTES and not codings
    return parsed() if is_short else await asyncio.to_thread(parsed)


async def _read(request: Request, max_bytes: int) -> bytes:
    length = int(request.headers.get("content-length", 0))  # no server passes on another text
    if length > max_bytes:
        raise too_large(f"{length} bytes", max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        chunks.append(chunk)
    if not size and "upgrade" in request.headers:
        # Serve's proxies take the offer for the end of the request.
        raise RequestError(
            "no body came; send the request without the header Upgrade (in Java, build the client "
            "with `version(HTTP_1_1)`)"
        )
    return b"".join(chunks)


def parse_body(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`; raises RequestError for anything else."""
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"the body is not valid UTF-8 at byte {error.start}; encode it as UTF-8"
        ) from None
    value = parse_json(text, "")
    if not isinstance(value, dict):
        raise RequestError(f"the body is {json_kind(value)}; send a JSON object")
    return value
