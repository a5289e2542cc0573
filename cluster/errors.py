"""Every error that Drafthouse raises on purpose, and how clients see each one.

    DrafthouseError
    ├── RequestError          the caller's fault; the same request fails again (4xx)
    │   ├── UnauthenticatedError  it has no key, or none that is known
    │   ├── ForbiddenError    its key does not allow it
    │   ├── NotFoundError     no model or drafter of that name is served
    │   ├── ContextLengthError  the prompt leaves no room in the model's context
    │   ├── TooLargeError     the body, prompt or frame exceeds a stated limit
    │   │   └── HeadTooLargeError  the path and headers of an HTTP request do
    │   ├── UnsupportedCodingError  the body is compressed in a way that is not served
    │   └── TooSlowError      the request did not arrive in time
    ├── CapacityError         the request is valid; retry later (429)
    │   └── UnavailableError  no worker is available at present (503)
    ├── DeadlineError         the time that the request allowed is over (504)
    ├── CancelledRequestError the client cancelled its request
    ├── WorkerError           one worker failed; the same work may succeed elsewhere
    ├── ProtocolError         two peers disagree: version skew, a mismatched model, or a bug
    └── ConfigError           the configuration cannot be served

Each message names the refused value and the remedy.  It never contains prompt text.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from cluster.records import frozen


class DrafthouseError(Exception):
    """Base of every error that Drafthouse raises on purpose."""

    code = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param  # the request field or configuration path at fault, if any

    @classmethod
    def at(cls, path: str, reason: str) -> Self:
        """The error of one request field or configuration key, with which its message begins."""
        return cls(f"{path}: {reason}", param=path)

    @property
    def reason(self) -> str:
        """The message without the name of the field, if it begins with that."""
        return self.message.removeprefix(f"{self.param}: ")


def reason_of(error: Exception) -> str:
    """Return what the system or a library says, without the name of the file, which is said
    already."""
    return getattr(error, "strerror", None) or str(error)


class RequestError(DrafthouseError):
    code = "invalid_request_error"


class UnauthenticatedError(RequestError):
    code = "invalid_api_key"


class ForbiddenError(RequestError):
    code = "permission_denied"


class NotFoundError(RequestError):
    code = "not_found_error"


class ContextLengthError(RequestError):
    code = "context_length_exceeded"

    @classmethod
    def of(cls, num_tokens: int, max_context_len: int, remedy: str, *, num_output: int = 1) -> Self:
        """The error of a prompt of so many tokens, in the words by which agents know that they
        must shorten the conversation.  num_output: tokens that it must leave room for."""
        most = max_context_len - num_output
        return cls.at(
            "prompt",
            f"prompt is too long: {num_tokens} tokens > {most} maximum; this model's maximum "
            f"context length is {max_context_len} tokens, prompt and output together; {remedy}",
        )


class TooLargeError(RequestError):
    code = "request_too_large"


class HeadTooLargeError(TooLargeError):
    code = "headers_too_large"


class UnsupportedCodingError(RequestError):
    code = "unsupported_content_encoding"


class TooSlowError(RequestError):
    code = "request_timeout"


class CapacityError(DrafthouseError):
    code = "rate_limit_exceeded"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(CapacityError):
    code = "service_unavailable"


class DeadlineError(DrafthouseError):
    code = "deadline_exceeded"


class CancelledRequestError(DrafthouseError):
    code = "request_cancelled"


class WorkerError(DrafthouseError):
    code = "worker_error"


class ProtocolError(DrafthouseError):
    code = "protocol_error"


class ConfigError(DrafthouseError):
    code = "config_error"

    @staticmethod
    @contextmanager
    def below(path: str, key: str = "") -> Iterator[None]:
        """Inside, errors name what they are about below `path`: their own key, or else `key`."""
        try:
            yield
        except ConfigError as error:
            place = ".".join(filter(None, (path, error.param or key)))
            raise ConfigError.at(place, error.reason) from error


@frozen
class Surface:
    """How clients see one error code: HTTP status, OpenAI error type, gRPC status name."""

    error: type[DrafthouseError]
    http_status: int
    openai_type: str
    grpc_status: str


# Maps our errors to HTTP and gRPC; a test checks that every class above is in it.
SURFACES: tuple[Surface, ...] = (
    Surface(DrafthouseError, 500, "server_error", "INTERNAL"),
    Surface(RequestError, 400, "invalid_request_error", "INVALID_ARGUMENT"),
    Surface(UnauthenticatedError, 401, "invalid_request_error", "UNAUTHENTICATED"),
    Surface(ForbiddenError, 403, "permission_error", "PERMISSION_DENIED"),
    Surface(NotFoundError, 404, "invalid_request_error", "NOT_FOUND"),
    Surface(ContextLengthError, 400, "invalid_request_error", "INVALID_ARGUMENT"),
    Surface(TooLargeError, 413, "invalid_request_error", "OUT_OF_RANGE"),
    Surface(HeadTooLargeError, 431, "invalid_request_error", "OUT_OF_RANGE"),
    Surface(UnsupportedCodingError, 415, "invalid_request_error", "INVALID_ARGUMENT"),
    Surface(TooSlowError, 408, "invalid_request_error", "DEADLINE_EXCEEDED"),
    Surface(DeadlineError, 504, "timeout_error", "DEADLINE_EXCEEDED"),
    Surface(CapacityError, 429, "rate_limit_error", "RESOURCE_EXHAUSTED"),
    Surface(UnavailableError, 503, "server_error", "UNAVAILABLE"),
    Surface(CancelledRequestError, 499, "cancelled", "CANCELLED"),
    Surface(WorkerError, 503, "server_error", "UNAVAILABLE"),
    Surface(ProtocolError, 502, "server_error", "FAILED_PRECONDITION"),
    Surface(ConfigError, 500, "server_error", "FAILED_PRECONDITION"),
)

_BY_CODE = {surface.error.code: surface for surface in SURFACES}
_BY_CLASS = {surface.error: surface for surface in SURFACES}


def surface_of(error: DrafthouseError) -> Surface:
    """How clients see `error`; a subclass without a row of its own uses its parent's."""
    return next(_BY_CLASS[kind] for kind in type(error).__mro__ if kind in _BY_CLASS)


def error_from_code(code: str, message: str, param: str | None = None) -> DrafthouseError:
    """Rebuild an error that crossed a process boundary; an unknown code is a ProtocolError."""
    surface = _BY_CODE.get(code)
    if surface is None:
        return ProtocolError(f"unknown error code {code!r} from a peer: {message}", param=param)
    return surface.error(message, param=param)
