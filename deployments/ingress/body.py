"""Reads the body of a request as one JSON object, within limits and without blocking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request

from cluster.config.schema import IngressConfig
from cluster.errors import RequestError, TooLargeError, TooSlowError
from cluster.text.json_text import parse_json
from deployments.ingress.fields import json_kind

T = TypeVar("T")

# Parsing this much takes about a millisecond; larger bodies are parsed in another thread.
_INLINE_BYTES = 128 * 1024


async def read_object(
    request: Request, settings: IngressConfig, parse: Callable[[dict[str, Any]], T]
) -> T:
    """Read the JSON object in the body of `request` and return the result of `parse`.

    Raises TooLargeError before it reads beyond the limit, TooSlowError if the body does not arrive
    in time, RequestError if the body is not a JSON object.
    """
    try:
        async with asyncio.timeout(settings.body_timeout_s):
            body = await _read(request, settings.max_body_bytes)
    except TimeoutError:
        raise TooSlowError(
            f"the body has not arrived within {settings.body_timeout_s:g} s; send it faster or "
            "raise ingress.body_timeout_s"
        ) from None
    if len(body) <= _INLINE_BYTES:
        return parse(parse_body(body))
    return await asyncio.to_thread(lambda: parse(parse_body(body)))


async def _read(request: Request, max_bytes: int) -> bytes:
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length[:20]) > max_bytes:
        raise _too_large(f"{length[:20]} bytes", max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(f"more than {max_bytes} bytes", max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(size: str, max_bytes: int) -> TooLargeError:
    return TooLargeError(
        f"the body has {size}, the limit is {max_bytes}; shorten it or raise ingress.max_body_bytes"
    )


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
