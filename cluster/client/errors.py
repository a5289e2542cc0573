"""Every error that the client raises for a call.

ClientError
├── InvalidRequestError   the same request fails again: a bad field, no such model
├── BusyError             the server is full, or a rate limit holds; retries are used up
├── UnavailableError      no server could be reached or kept; retries are used up
├── DeadlineError         the time that was allowed is over
├── CancelledError        the call was cancelled
└── ProtocolError         client and server disagree: version skew, or a bug
"""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from grpc import StatusCode

# Trailing metadata of an error; cluster.rpc.status writes the first three.
CODE_KEY = "drafthouse-code"
PARAM_KEY = "drafthouse-param"
RETRY_AFTER_KEY = "drafthouse-retry-after-s"
# What gateways send: gRPC's own retry push-back (A6) and HTTP's header, in seconds.
PUSHBACK_KEY = "grpc-retry-pushback-ms"
HTTP_RETRY_AFTER_KEY = "retry-after"


class ClientError(Exception):
    """Base of every error of a call.

    code: the error code of the HTTP API, e.g. "invalid_request_error"; "" if a proxy or gRPC itself
    ended the call.  status: the gRPC status.  param: the request field at fault, if one is named.
    retry_after_s: how long the server asks to wait, None = it does not say.
    is_final: whether the server asks not to be called again.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        status: StatusCode = StatusCode.UNKNOWN,
        param: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.status = status
        self.param = param
        self.retry_after_s: float | None = None
        self.is_final = False


class InvalidRequestError(ClientError):
    pass


class BusyError(ClientError):
    pass


class UnavailableError(ClientError):
    pass


class DeadlineError(ClientError):
    pass


class CancelledError(ClientError):
    pass


class ProtocolError(ClientError):
    pass


# A test checks that every status is here.
_KINDS: dict[StatusCode, type[ClientError]] = {
    StatusCode.OK: ProtocolError,  # a failed call that says it succeeded
    StatusCode.INVALID_ARGUMENT: InvalidRequestError,
    StatusCode.NOT_FOUND: InvalidRequestError,
    StatusCode.OUT_OF_RANGE: InvalidRequestError,
    StatusCode.ALREADY_EXISTS: InvalidRequestError,
    StatusCode.PERMISSION_DENIED: InvalidRequestError,
    StatusCode.UNAUTHENTICATED: InvalidRequestError,
    StatusCode.RESOURCE_EXHAUSTED: BusyError,
    StatusCode.UNAVAILABLE: UnavailableError,
    StatusCode.ABORTED: UnavailableError,
    StatusCode.DATA_LOSS: UnavailableError,
    StatusCode.INTERNAL: UnavailableError,
    StatusCode.UNKNOWN: UnavailableError,
    StatusCode.DEADLINE_EXCEEDED: DeadlineError,
    StatusCode.CANCELLED: CancelledError,
    StatusCode.UNIMPLEMENTED: ProtocolError,
    StatusCode.FAILED_PRECONDITION: ProtocolError,
}
# In these words gRPC says that this side has cancelled the call, or closed the channel.
_OWN_CANCELLATIONS = ("Locally cancelled by application!", "Channel closed!")


def error_of(call: Any, address: str) -> ClientError:
    """The error that a server, a proxy or gRPC itself ended a call with.

    call: the `grpc.RpcError`, with code, details and metadata."""
    status, details = call.code(), call.details() or ""
    metadata: dict[str, Any] = dict(call.trailing_metadata() or ())
    kind = _KINDS[status]
    # gRPC refuses messages over its limit with the status of a full server: the next is as long.
    if "larger than max" in details:
        kind = InvalidRequestError
    code = metadata.get(CODE_KEY, "")
    # A server that stops cancels what has just come in; another server answers.
    if kind is CancelledError and not code and details not in _OWN_CANCELLATIONS:
        kind = UnavailableError
    message = details if code else f"gRPC status {status.name} from {address}: {details}"
    param = metadata.get(PARAM_KEY)
    error = kind(message, code=code, status=status, param=None if param is None else unquote(param))
    if PUSHBACK_KEY in metadata:
        error.retry_after_s = _seconds(metadata[PUSHBACK_KEY], 1e-3)
        error.is_final = error.retry_after_s is None
    else:
        asked = metadata.get(RETRY_AFTER_KEY, metadata.get(HTTP_RETRY_AFTER_KEY))
        error.retry_after_s = _seconds(asked)
    return error


def _seconds(value: Any, unit_s: float = 1.0) -> float | None:
    """A number of 0 or more, in seconds; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        return None
    return number * unit_s if 0.0 <= number < float("inf") else None
