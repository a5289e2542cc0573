"""Every DrafthouseError is the same on both sides of gRPC."""

import pytest

from cluster.errors import ERRORS, CapacityError, DrafthouseError
from cluster.rpc.status import error_from_status, trailing_metadata


@pytest.mark.parametrize("kind", ERRORS)
def test_every_error_survives_grpc_unchanged(kind: type[DrafthouseError]):
    error = kind("what and what to do", param="messages[0].rôle")
    if isinstance(error, CapacityError):
        error.retry_after_s = 2.5
    metadata = dict(trailing_metadata(error))
    assert all(value.isascii() for value in metadata.values())
    rebuilt = error_from_status(error.message, metadata)
    assert type(rebuilt) is kind
    assert vars(rebuilt) == vars(error)


@pytest.mark.parametrize("sent", [{}, {"drafthouse-retry-after-s": "soon"}])
def test_an_invalid_retry_delay_becomes_the_default(sent: dict[str, str]):
    rebuilt = error_from_status("busy", {"drafthouse-code": "rate_limit_exceeded", **sent})
    assert isinstance(rebuilt, CapacityError)
    assert rebuilt.retry_after_s == CapacityError("").retry_after_s
