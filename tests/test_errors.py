import http

import grpc
import pytest

from cluster import errors
from cluster.errors import (
    ERRORS,
    CapacityError,
    DrafthouseError,
    ProtocolError,
    RequestError,
    error_from_code,
)

of_every_kind = pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)


@of_every_kind
def test_clients_see_whose_fault_each_error_is(kind: type[DrafthouseError]):
    assert kind.__name__ in (errors.__doc__ or "")
    assert kind.grpc_status in grpc.StatusCode.__members__
    # 429 asks for patience.
    is_4xx = 400 <= kind.http_status < 500 and kind.http_status != 429
    assert is_4xx == issubclass(kind, RequestError)
    assert http.HTTPStatus(kind.http_status)


@of_every_kind
def test_an_error_survives_a_process_boundary_as_code_and_message(
    kind: type[DrafthouseError],
):
    rebuilt = error_from_code(kind.code, "prompt has 9000 tokens", "messages")
    assert type(rebuilt) is kind
    assert rebuilt.message == str(rebuilt) == "prompt has 9000 tokens"
    assert rebuilt.param == "messages"


def test_an_unknown_code_from_a_peer_is_a_protocol_error():
    error = error_from_code("from_the_future", "what it said")
    assert isinstance(error, ProtocolError)
    assert "from_the_future" in error.message
    assert "what it said" in error.message


def test_capacity_errors_have_a_retry_delay():
    assert CapacityError("full").retry_after_s > 0
    assert errors.UnavailableError("none", retry_after_s=2.5).retry_after_s == 2.5
