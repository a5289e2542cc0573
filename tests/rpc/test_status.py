"""Every DrafthouseError is the same on both sides of gRPC."""

from __future__ import annotations

import grpc
import pytest

from cluster.errors import (
    ERRORS,
    CapacityError,
    DrafthouseError,
    ProtocolError,
    RequestError,
    TooLargeError,
    UnavailableError,
    WorkerError,
)
from cluster.rpc.status import error_from_status, status_code, trailing_metadata


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_grpc_unchanged(kind: type[DrafthouseError]) -> None:
    error = kind("what and what to do", param="messages[0].rôle")
    metadata = dict(trailing_metadata(error))
    assert all(value.isascii() for value in metadata.values())
    rebuilt = error_from_status(status_code(error), error.message, metadata)
    assert type(rebuilt) is kind
    assert (rebuilt.message, rebuilt.param) == (error.message, error.param)


def test_the_retry_delay_survives_grpc() -> None:
    error = UnavailableError("busy", retry_after_s=2.5)
    rebuilt = error_from_status(status_code(error), "busy", dict(trailing_metadata(error)))
    assert isinstance(rebuilt, UnavailableError)
    assert rebuilt.retry_after_s == 2.5


def test_an_invalid_retry_delay_becomes_the_default() -> None:
    metadata = {"drafthouse-code": "rate_limit_exceeded", "drafthouse-retry-after-s": "soon"}
    rebuilt = error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "busy", metadata)
    assert isinstance(rebuilt, CapacityError)
    assert rebuilt.retry_after_s == CapacityError("").retry_after_s


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.UNAVAILABLE, UnavailableError),
        (grpc.StatusCode.INTERNAL, WorkerError),
        (grpc.StatusCode.UNKNOWN, WorkerError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, WorkerError),
        (grpc.StatusCode.INVALID_ARGUMENT, RequestError),
        (grpc.StatusCode.OUT_OF_RANGE, TooLargeError),
        (grpc.StatusCode.UNIMPLEMENTED, ProtocolError),
        (grpc.StatusCode.FAILED_PRECONDITION, ProtocolError),
    ],
)
def test_a_foreign_status_becomes_one_of_our_errors(
    code: grpc.StatusCode, kind: type[DrafthouseError]
) -> None:
    error = error_from_status(code, "details", {}, peer="host:1")
    assert type(error) is kind
    assert "host:1" in error.message


def test_every_grpc_status_has_an_error_class() -> None:
    for code in grpc.StatusCode:
        assert isinstance(error_from_status(code, "", {}), DrafthouseError)
