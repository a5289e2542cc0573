"""What the client decides without a server: delays, resumption, errors, endpoints."""

from collections.abc import Sequence

import grpc
import pytest

from cluster.client import (
    BusyError,
    ChoiceDelta,
    ClientError,
    Endpoint,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    InvalidRequestError,
    ProtocolError,
    ResumedChoice,
)
from cluster.client.answer import Resumption
from cluster.client.errors import error_of
from cluster.client.retry import Attempts
from cluster.errors import ERRORS, CapacityError, DrafthouseError
from cluster.rpc.status import status_code, trailing_metadata

REQUEST = GenerateRequest(model="toy", text="prompt")
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
Metadata = Sequence[tuple[str, str]]


class Failure(grpc.RpcError):
    """A call that a server, or its absence, has ended."""

    def __init__(
        self, status: grpc.StatusCode, details: str = "why", metadata: Metadata = ()
    ) -> None:
        self.code = lambda: status
        self.details = lambda: details
        self.trailing_metadata = lambda: metadata


GONE = Failure(grpc.StatusCode.UNAVAILABLE)


def attempts(max_retries: int, jitter: float = 0.0) -> Attempts:
    return Attempts(Endpoint("host:1"), max_retries, jitter=lambda: jitter)


def response(*choices: ChoiceDelta, seed: int = 1) -> GenerateResponse:
    return GenerateResponse(id="id", model="toy", seed=seed, choices=choices)


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.code)
def test_every_error_of_the_server_is_one_of_the_client(kind: type[DrafthouseError]):
    sent = kind("what and what to do", param="messages[0].rôle")
    failure = Failure(status_code(sent), sent.message, trailing_metadata(sent))
    read = error_of(failure, "host:1")
    assert type(read) is not ClientError
    assert (read.message, read.code, read.param) == (sent.message, sent.code, sent.param)
    if isinstance(sent, CapacityError):
        assert read.retry_after_s == sent.retry_after_s


@pytest.mark.parametrize("status", list(grpc.StatusCode))
def test_every_status_has_an_error(status: grpc.StatusCode):
    error = error_of(Failure(status), "host:1")
    assert type(error) is not ClientError
    assert (error.status, error.code, error.retry_after_s) == (status, "", None)
    assert "host:1" in error.message


@pytest.mark.parametrize(
    ("metadata", "seconds", "is_final"),
    [
        ({"drafthouse-retry-after-s": "2.5"}, 2.5, False),
        ({"retry-after": "3"}, 3.0, False),
        ({"grpc-retry-pushback-ms": "250", "retry-after": "9"}, 0.25, False),
        ({"grpc-retry-pushback-ms": "-1"}, None, True),
        ({"drafthouse-retry-after-s": "soon"}, None, False),
        ({"retry-after": "inf"}, None, False),
        ({}, None, False),
    ],
)
def test_the_delay_that_a_server_asks_for(
    metadata: dict[str, str], seconds: float | None, is_final: bool
):
    error = error_of(Failure(FULL, "full", [*metadata.items()]), "host:1")
    assert isinstance(error, BusyError)
    assert (error.retry_after_s, error.is_final) == (seconds, is_final)


def test_a_message_over_a_limit_of_grpc_is_not_sent_again():
    details = "CLIENT: Received message larger than max (20 vs. 10)"
    assert isinstance(error_of(Failure(FULL, details), "host:1"), InvalidRequestError)


def test_delays_double_to_a_limit_and_jitter_makes_them_longer():
    calls = attempts(2000)
    delays = [calls.delay_after(GONE) for _ in range(2000)]
    assert delays == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 1994])
    assert attempts(1, jitter=1.0).delay_after(GONE) == pytest.approx(0.125)


def test_a_delay_that_the_server_asks_for_is_never_shortened():
    full = Failure(FULL, metadata=[("retry-after", "30")])
    assert attempts(1).delay_after(full) == 30.0


def test_what_the_caller_resumes_is_continued():
    asked = GenerateRequest(n=2, resume=[ResumedChoice(index=1, token_ids=[4, 5])])
    resumption = Resumption(asked)
    assert resumption.is_started
    resumption.accept(response(ChoiceDelta(index=1, token_ids=[6])))
    resumption.accept(response(ChoiceDelta(index=0, token_ids=[7])))
    assert [list(one.token_ids) for one in resumption.request().resume] == [[7], [4, 5, 6]]
    assert [list(one.token_ids) for one in asked.resume] == [[4, 5]]


def test_an_empty_response_before_an_error_says_nothing():
    resumption = Resumption(REQUEST)
    assert not resumption.accept(GenerateResponse())
    assert not resumption.is_started
    assert not resumption.request().sampling.HasField("seed")


@pytest.mark.parametrize("index", [0, 3])
def test_a_choice_that_is_finished_or_was_not_requested_is_a_protocol_error(index: int):
    resumption = Resumption(REQUEST)
    ended = FinishReason.FINISH_REASON_STOP
    resumption.accept(response(ChoiceDelta(index=0, finish_reason=ended)))
    with pytest.raises(ProtocolError, match=f"choice {index}"):
        resumption.accept(response(ChoiceDelta(index=index, text="x")))


@pytest.mark.parametrize(
    ("parts", "remedy"),
    [
        ({"root_certificates": b"pem"}, "tls=True"),
        ({"server_name": "name"}, "tls=True"),
        ({"private_key": b"pem", "certificate_chain": b"pem"}, "tls=True"),
        ({"tls": True, "private_key": b"pem"}, "both or none"),
        ({"tls": True, "certificate_chain": b"pem"}, "both or none"),
    ],
)
def test_parts_of_an_endpoint_that_do_not_go_together_are_refused(
    parts: dict[str, object], remedy: str
):
    with pytest.raises(ValueError, match=remedy):
        Endpoint("host:1", **parts)


def test_secrets_of_an_endpoint_are_not_shown():
    shown = repr(
        Endpoint(
            "host:1", True, None, b"the key", b"chain", metadata=[("authorization", "the token")]
        )
    )
    assert "the key" not in shown
    assert "the token" not in shown
