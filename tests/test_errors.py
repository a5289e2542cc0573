import http

import grpc
import pytest

from cluster import errors
from cluster.errors import (
    SURFACES,
    CapacityError,
    DrafthouseError,
    ProtocolError,
    RequestError,
    TooLargeError,
    error_from_code,
    surface_of,
)


def every_error(root: type[DrafthouseError] = DrafthouseError) -> list[type[DrafthouseError]]:
    own = [kind for kind in root.__subclasses__() if kind.__module__ == errors.__name__]
    return [root, *(found for kind in own for found in every_error(kind))]


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_every_error_is_once_in_the_table_and_in_the_drawing(
    kind: type[DrafthouseError],
) -> None:
    assert [surface.error for surface in SURFACES].count(kind) == 1
    assert errors.__doc__ is not None
    assert kind.__name__ in errors.__doc__


def test_the_table_contains_only_our_errors() -> None:
    assert {surface.error for surface in SURFACES} == set(every_error())


def test_codes_are_unique() -> None:
    codes = [surface.error.code for surface in SURFACES]
    assert len(set(codes)) == len(codes)


@pytest.mark.parametrize("surface", SURFACES, ids=lambda surface: surface.error.__name__)
def test_the_grpc_status_exists_and_the_http_status_agrees_with_whose_fault_it_is(
    surface: errors.Surface,
) -> None:
    assert surface.grpc_status in grpc.StatusCode.__members__
    is_callers_fault = issubclass(surface.error, RequestError)
    # 429 asks for patience and 499 is nobody's fault.
    is_4xx = 400 <= surface.http_status < 499 and surface.http_status != 429
    assert is_4xx == is_callers_fault
    # 499 (client closed its request) is nginx's, in no standard, and never sent.
    assert surface.http_status == 499 or http.HTTPStatus(surface.http_status)


@pytest.mark.parametrize("kind", every_error(), ids=lambda kind: kind.__name__)
def test_an_error_survives_a_process_boundary_as_code_and_message(
    kind: type[DrafthouseError],
) -> None:
    rebuilt = error_from_code(kind.code, "prompt has 9000 tokens", "messages")
    assert type(rebuilt) is kind
    assert rebuilt.message == str(rebuilt) == "prompt has 9000 tokens"
    assert rebuilt.param == "messages"


def test_an_unknown_code_from_a_peer_is_a_protocol_error() -> None:
    error = error_from_code("from_the_future", "what it said")
    assert isinstance(error, ProtocolError)
    assert "from_the_future" in error.message
    assert "what it said" in error.message


def test_a_subclass_without_a_row_looks_like_its_parent() -> None:
    class PromptTooLongError(TooLargeError):
        pass

    class OddCodeError(TooLargeError):
        code = "odd"

    assert surface_of(PromptTooLongError("x")).http_status == 413
    assert surface_of(OddCodeError("x")).http_status == 413


def test_capacity_errors_have_a_retry_delay() -> None:
    assert CapacityError("full").retry_after_s > 0
    assert errors.UnavailableError("none", retry_after_s=2.5).retry_after_s == 2.5
