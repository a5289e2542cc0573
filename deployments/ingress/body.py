"""Reads the body of a request as one JSON object, within limits and without blocking: a compressed
one is never unpacked beyond the bound."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import math
import sys
import traceback
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from cluster.errors import (
    CapacityError,
    DrafthouseError,
    RequestError,
    TooLargeError,
    TooSlowError,
    UnauthenticatedError,
    UnsupportedCodingError,
)
from cluster.text.json_text import parse_json
from deployments.ingress.spec import Limits
from deployments.ingress.wording import JsonObject, json_kind

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# What clients are told to send.
CODINGS = "gzip, deflate, zstd"
# One is what clients send.  Each is a whole body that is unpacked.
_MAX_CODINGS = 3
# gzip and zstd may go on with another piece behind the end of one.  A body of nothing but the
# shortest ones would take hours.
_MAX_PIECES = 64
# No larger window is needed to read what is sent over HTTP: RFC 9659.
_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 23}
_GZIP = (partial(zlib.decompressobj, 16 + zlib.MAX_WBITS),)
# What makes decoders of each coding, to be tried one after the other.  `deflate` has zlib's head by
# its definition (RFC 9110, 8.4.1), and by some clients none.
_DECODERS: dict[str, Sequence[Callable[[], Any]]] = {
    "gzip": _GZIP,
    "x-gzip": _GZIP,
    "deflate": (zlib.decompressobj, partial(zlib.decompressobj, -zlib.MAX_WBITS)),
    "zstd": (partial(zstd.ZstdDecompressor, options=_WINDOW),),
}


def too_large(size: str, max_bytes: int) -> TooLargeError:
    """Return the refusal of a body of that size, in words."""
    return TooLargeError(
        f"the body has {size}, the limit is {max_bytes}; shorten it or raise ingress.max_body_bytes"
    )


def codings_of(headers: Sequence[str]) -> list[str]:
    """Return the codings of a body, in the order in which they were applied, from its
    Content-Encoding headers; raises UnsupportedCodingError."""
    sent = ",".join(headers)
    names = [name.strip() for name in sent.lower().split(",")]
    names = [name for name in names if name not in ("", "identity")]
    if len(names) > _MAX_CODINGS or not _DECODERS.keys() >= set(names):
        raise UnsupportedCodingError(
            f"Content-Encoding: {sent[:80]!r} is not served; send one of {CODINGS}, at most "
            f"{_MAX_CODINGS} of them, or none"
        )
    return names


def unpack(body: bytes, codings: Sequence[str], max_bytes: int) -> bytes:
    """Return the body without its codings.

    Raises TooLargeError for one that is larger then, RequestError for one that is damaged."""
    for name in reversed(codings):
        for make in _DECODERS[name]:
            with contextlib.suppress(zlib.error, zstd.ZstdError, EOFError):
                body = _pieces(make, body, max_bytes)
                break
        else:
            raise RequestError(
                f"the body is damaged, or no {name} of at most {_MAX_PIECES} pieces (in zstd with "
                "a window of at most 8 MiB), which Content-Encoding says it is; compress it anew, "
                "or send it as it is"
            )
    return body


def _pieces(make: Callable[[], Any], body: bytes, max_bytes: int) -> bytes:
    """Return what every piece holds; raises EOFError where the last one does not end."""
    found: bytes = b""
    for _ in range(_MAX_PIECES):
        decoder = make()
        found += decoder.decompress(body, max_bytes + 1 - len(found))
        if len(found) > max_bytes:
            raise too_large(f"more than {max_bytes} bytes", max_bytes)
        body = decoder.unused_data
        if decoder.eof and not body:
            return found
    raise EOFError


T = TypeVar("T")

# Parsing this much takes about a millisecond; larger bodies are parsed in another thread.
_INLINE_BYTES = 128 * 1024


async def read_object(
    request: Request, limits: Limits, parse: Callable[[JsonObject, Limits], T]
) -> T:
    """Read the JSON object in the body of `request` and return what `parse` makes of it.

    Raises UnsupportedCodingError before it reads, TooLargeError before it reads or unpacks beyond
    the limit, TooSlowError if the body does not arrive in time, RequestError if the body is not a
    JSON object.
    """
    settings = limits.config.ingress
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
        return parse(parse_body(unpack(body, codings, limit)), limits)

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
    return b"".join(chunks)


def parse_body(body: bytes) -> JsonObject:
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


# Formats errors as OpenAI does: {"error": {"message", "type", "param", "code"}}; and what a bug
# of ours becomes for the client, and for the log.


log = logging.getLogger(__name__)
# The innermost ones: an endless recursion has a thousand.
_MAX_FRAMES = 20

# An error and the id of its request, as JSON.
ErrorBody = Callable[[DrafthouseError, str], bytes]


def error_body(error: DrafthouseError, request_id: str) -> bytes:
    """`error` as a JSON object."""
    content = {
        "message": error.message,
        "type": error.openai_type,
        "param": error.param,
        "code": error.code,
    }
    return json.dumps({"error": content, "request_id": request_id}).encode()


def error_response(
    error: DrafthouseError, request_id: str, body: ErrorBody = error_body
) -> Response:
    """Return the whole HTTP answer; for overload errors with the time to retry."""
    headers = {}
    if isinstance(error, CapacityError):
        headers["Retry-After"] = str(max(1, math.ceil(error.retry_after_s)))
    if isinstance(error, UnauthenticatedError):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, UnsupportedCodingError):
        headers["Accept-Encoding"] = CODINGS
    return Response(
        body(error, request_id),
        status_code=error.http_status,
        media_type="application/json",
        headers=headers,
    )


def hidden(error: Exception, request_id: str) -> DrafthouseError:
    """The answer to a request that met `error`: itself, if it is meant for clients.

    Of others the log says where, in some lines: the message may contain anything, including prompt
    text, so it is not told.
    """
    if isinstance(error, DrafthouseError):
        return error
    places = "".join(traceback.format_tb(error.__traceback__, limit=-_MAX_FRAMES))
    log.error("unexpected %s id=%s at\n%s", type(error).__name__, request_id, places)
    return DrafthouseError("internal error; the server's log says where it happened")
