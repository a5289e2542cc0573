"""Formats errors as OpenAI does: {"error": {"message", "type", "param", "code"}}; and what a bug of
ours becomes for the client, and for the log."""

from __future__ import annotations

import json
import logging
import math
import traceback
from collections.abc import Callable

from starlette.responses import Response

from cluster.errors import (
    CapacityError,
    DrafthouseError,
    UnauthenticatedError,
    UnsupportedCodingError,
)
from deployments.ingress.body import CODINGS

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


def error_event(error: DrafthouseError, request_id: str) -> bytes:
    """An error inside a stream that has begun: the last event before [DONE]."""
    return b"data: " + error_body(error, request_id) + b"\n\n"


def hidden(error: Exception, request_id: str) -> DrafthouseError:
    """The answer to a request that met `error`; the log says where, in some lines.

    The error's message may contain anything, including prompt text, so it is not told.
    """
    places = "".join(traceback.format_tb(error.__traceback__, limit=-_MAX_FRAMES))
    log.error("unexpected %s id=%s at\n%s", type(error).__name__, request_id, places)
    return DrafthouseError("internal error; the server's log says where it happened")
