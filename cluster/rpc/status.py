"""Converts our errors to gRPC statuses and back.

The status gives the kind of error.  The trailing metadata gives the exact error code, the field at
fault and the retry delay, so that an error is the same on both sides of the wire.
"""

from __future__ import annotations

from typing import Any, NoReturn
from urllib.parse import quote, unquote

import grpc

from cluster.errors import (
    ERRORS,
    CapacityError,
    DrafthouseError,
    ProtocolError,
    RequestError,
    WorkerError,
    error_from_code,
)

CODE_KEY = "drafthouse-code"
PARAM_KEY = "drafthouse-param"
RETRY_AFTER_KEY = "drafthouse-retry-after-s"

# The error for a status without our error code, which comes from a proxy or from gRPC itself.
_DEFAULTS: dict[str, type[DrafthouseError]] = {
    "DEADLINE_EXCEEDED": WorkerError,
    "ABORTED": WorkerError,
    "DATA_LOSS": WorkerError,
    "INTERNAL": WorkerError,
    "UNKNOWN": WorkerError,
    "UNIMPLEMENTED": ProtocolError,
    "FAILED_PRECONDITION": ProtocolError,
    "ALREADY_EXISTS": RequestError,
}


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


def error_from_status(
    code: grpc.StatusCode, details: str, metadata: dict[str, Any], *, peer: str = ""
) -> DrafthouseError:
    """Rebuild the error that a peer sent; messages name `peer` if the error is not one of ours."""
    param = metadata.get(PARAM_KEY)
    our_code = metadata.get(CODE_KEY)
    if our_code is None:
        where = f" from {peer}" if peer else ""
        foreign = _default_kind(code)(f"gRPC status {code.name}{where}: {details}")
        if isinstance(foreign, CapacityError):
            foreign.retry_after_s = 0.0  # no delay given; the caller's own back-off decides
        return foreign
    error = error_from_code(our_code, details, None if param is None else unquote(param))
    if isinstance(error, CapacityError):
        error.retry_after_s = _seconds(metadata.get(RETRY_AFTER_KEY), error.retry_after_s)
    return error


def _default_kind(code: grpc.StatusCode) -> type[DrafthouseError]:
    kinds = (each for each in ERRORS if each.grpc_status == code.name)
    return _DEFAULTS.get(code.name) or next(kinds, ProtocolError)


def _seconds(text: Any, default: float) -> float:
    try:
        return float(text)
    except (TypeError, ValueError):
        return default
