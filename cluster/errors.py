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
    ├── WorkerError           one worker failed; the same work may succeed elsewhere
    ├── ProtocolError         two peers disagree: version skew, a mismatched model, or a bug
    └── ConfigError           the configuration cannot be served

Each message names the refused value and the remedy.  It never contains prompt text.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Self


class DrafthouseError(Exception):
    """Base of every error that Drafthouse raises on purpose.

    How clients see it: HTTP status, OpenAI error type, gRPC status name."""

    code = "internal_error"
    http_status = 500
    openai_type = "server_error"
    grpc_status = "INTERNAL"

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


def joined(path: str, below: str) -> str:
    """The path of what is `below` a place, "" = the place itself."""
    return path + (f".{below}" if path and below and not below.startswith("[") else below)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question with the known name that is most like `name`, "" where none is."""
    near = difflib.get_close_matches(name, [*known], n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else ""


def reason_of(error: Exception) -> str:
    """Return what the system or a library says, without the name of the file, which is said
    already."""
    return getattr(error, "strerror", None) or str(error)


class RequestError(DrafthouseError):
    code = "invalid_request_error"
    http_status = 400
    openai_type = "invalid_request_error"
    grpc_status = "INVALID_ARGUMENT"


class UnauthenticatedError(RequestError):
    code = "invalid_api_key"
    http_status = 401
    grpc_status = "UNAUTHENTICATED"


class ForbiddenError(RequestError):
    code = "permission_denied"
    http_status = 403
    openai_type = "permission_error"
    grpc_status = "PERMISSION_DENIED"


class NotFoundError(RequestError):
    code = "not_found_error"
    http_status = 404
    grpc_status = "NOT_FOUND"


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
    http_status = 413
    grpc_status = "OUT_OF_RANGE"


class HeadTooLargeError(TooLargeError):
    code = "headers_too_large"
    http_status = 431


class UnsupportedCodingError(RequestError):
    code = "unsupported_content_encoding"
    http_status = 415


class TooSlowError(RequestError):
    code = "request_timeout"
    http_status = 408
    grpc_status = "DEADLINE_EXCEEDED"


class CapacityError(DrafthouseError):
    code = "rate_limit_exceeded"
    http_status = 429
    openai_type = "rate_limit_error"
    grpc_status = "RESOURCE_EXHAUSTED"

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: float = 1.0
    ) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(CapacityError):
    code = "service_unavailable"
    http_status = 503
    openai_type = "server_error"
    grpc_status = "UNAVAILABLE"


class DeadlineError(DrafthouseError):
    code = "deadline_exceeded"
    http_status = 504
    openai_type = "timeout_error"
    grpc_status = "DEADLINE_EXCEEDED"


class WorkerError(DrafthouseError):
    code = "worker_error"
    http_status = 503
    grpc_status = "UNAVAILABLE"


class ProtocolError(DrafthouseError):
    code = "protocol_error"
    http_status = 502
    grpc_status = "FAILED_PRECONDITION"


class ConfigError(DrafthouseError):
    code = "config_error"
    grpc_status = "FAILED_PRECONDITION"

    @staticmethod
    @contextmanager
    def below(path: str, key: str = "") -> Iterator[None]:
        """Inside, errors name what they are about below `path`: their own key, or else `key`."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError.at(joined(path, error.param or key), error.reason) from error


def _below(kind: type[DrafthouseError]) -> Iterator[type[DrafthouseError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _below(each)


ERRORS = tuple(_below(DrafthouseError))


def error_from_code(code: str, message: str, param: str | None = None) -> DrafthouseError:
    """Rebuild an error that crossed a process boundary; an unknown code is a ProtocolError."""
    for kind in ERRORS:
        if kind.code == code:
            return kind(message, param=param)
    return ProtocolError(f"unknown error code {code!r} from a peer: {message}", param=param)
