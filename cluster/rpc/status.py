"""Converts our errors to gRPC statuses and back.

The status gives the kind of error.  The trailing metadata gives the exact error code, the field at
fault and the retry delay, so that an error is the same on both sides of the wire.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NoReturn
from urllib.parse import quote, unquote

import grpc

from cluster.errors import CapacityError, DrafthouseError, error_from_code

CODE_KEY = "drafthouse-code"
PARAM_KEY = "drafthouse-param"
RETRY_AFTER_KEY = "drafthouse-retry-after-s"


def status_code(error: DrafthouseError) -> grpc.StatusCode:
    """The gRPC status of `error`."""
    return grpc.StatusCode[error.grpc_status]


def trailing_metadata(error: DrafthouseError) -> tuple[tuple[str, str], ...]:
    """The metadata sent with the status; it is ASCII, so the field is percent-encoded."""
    metadata = [(CODE_KEY, error.code)]
    if error.param is not None:
        metadata.append((PARAM_KEY, quote(error.param, safe="[]._-")))
    if isinstance(error, CapacityError):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    return tuple(metadata)


async def abort(context: Any, error: DrafthouseError) -> NoReturn:
    """End the call of a grpc.aio servicer context with `error`."""
    await context.abort(status_code(error), error.message, trailing_metadata(error))
    raise AssertionError("abort returns by raising")


def error_from_status(details: str, metadata: Mapping[str, Any]) -> DrafthouseError:
    """Rebuild the error that a peer sent with `trailing_metadata`."""
    param = metadata.get(PARAM_KEY)
    error = error_from_code(metadata[CODE_KEY], details, None if param is None else unquote(param))
    if isinstance(error, CapacityError):
        # A delay that is missing or no number becomes the default.
        with contextlib.suppress(KeyError, ValueError):
            error.retry_after_s = float(metadata[RETRY_AFTER_KEY])
    return error
