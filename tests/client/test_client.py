"""The clients resume broken streams with the same text, retry what may succeed, can be left, and
check who answers."""

import asyncio
import threading
import time
from typing import Any

import grpc
import pytest

from cluster.client import (
    AsyncClient,
    BusyError,
    CancelledError,
    Client,
    ClientError,
    DeadlineError,
    Endpoint,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    ProtocolError,
    SamplingOptions,
    UnavailableError,
)
from tests.client.conftest import Complete, Serve
from tests.support.rpc.certificates import Authority
from tests.support.rpc.scripted_service import (
    NUM_TOKENS,
    PATIENCE_S,
    Break,
    EndlessService,
    ScriptedService,
    expected_text,
    token_at,
)

pytestmark = pytest.mark.usefixtures("hurried")

REQUEST = GenerateRequest(model="toy", text="prompt")


def busy(*metadata: tuple[str, str]) -> Break:
    return Break(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", metadata)


def test_an_unbroken_stream_gives_one_answer_with_everything(serve: Serve, complete: Complete):
    service = ScriptedService()
    request = GenerateRequest(model="toy", text="p", sampling=SamplingOptions(seed=9), n=2)
    answer = complete(serve(service), request)
    assert len(answer.choices) == 2
    for index, choice in enumerate(answer.choices):
        assert (choice.index, choice.text) == (index, expected_text(9, index))
        assert choice.finish_reason == FinishReason.FINISH_REASON_LENGTH
        assert list(choice.token_ids) == [token_at(9, index, at) for at in range(NUM_TOKENS)]
        assert list(choice.logprobs.logprobs) == [-float(at) for at in range(NUM_TOKENS)]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 2 * NUM_TOKENS)
    assert answer.speculative_decoding.num_spec_steps == 3
    assert (answer.id, answer.seed, len(service.requests)) == ("id", 9, 1)


@pytest.mark.parametrize(
    "cause",
    [
        Break(),
        Break(grpc.StatusCode.INTERNAL),
        Break(grpc.StatusCode.CANCELLED),  # by a server that stops
        Break(metadata=(("drafthouse-code", "worker_error"),)),
        busy(("drafthouse-retry-after-s", "0")),
        None,
    ],
    ids=["unavailable", "internal", "cancelled", "worker", "busy", "early end"],
)
def test_a_broken_stream_is_resumed_with_the_same_text(
    serve: Serve, complete: Complete, cause: Break | None
):
    service = ScriptedService(breaks=[(5, cause), (0, cause), (16, cause), (3, cause)])
    answer = complete(serve(service), GenerateRequest(model="toy", text="p", n=2))
    texts = [expected_text(answer.seed, index) for index in range(2)]
    assert [choice.text for choice in answer.choices] == texts
    assert len(service.requests) > 2
    assert {request.sampling.seed for request in service.requests[1:]} == {answer.seed}
    assert [len(choice.token_ids) for choice in service.requests[1].resume] == [3, 2]
    assert service.requests[1].request_id == "id"


def test_a_stream_that_breaks_between_the_last_token_and_the_usage_is_finished(
    serve: Serve, complete: Complete
):
    service = ScriptedService(breaks=[(NUM_TOKENS, Break())])
    answer = complete(serve(service), REQUEST)
    assert answer.choices[0].text == expected_text(answer.seed, 0)
    assert answer.usage.completion_tokens == NUM_TOKENS
    assert service.requests[1].resume[0].finished


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "invalid_request_error", InvalidRequestError),
        (grpc.StatusCode.NOT_FOUND, "not_found_error", InvalidRequestError),
        (grpc.StatusCode.FAILED_PRECONDITION, "protocol_error", ProtocolError),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "deadline_exceeded", DeadlineError),
    ],
    ids=str,
)
def test_errors_that_a_retry_cannot_fix_are_raised_at_once(
    serve: Serve,
    complete: Complete,
    status: grpc.StatusCode,
    code: str,
    kind: type[ClientError],
):
    metadata = (("drafthouse-code", code), ("drafthouse-param", "r%C3%B4le"))
    service = ScriptedService(breaks=[(0, Break(status, "too hot; use 0", metadata))])
    with pytest.raises(kind) as raised:
        complete(serve(service), REQUEST)
    error = raised.value
    assert (error.message, error.code, error.param) == ("too hot; use 0", code, "rôle")
    assert error.status is status
    assert len(service.requests) == 1


FULL = busy(("drafthouse-code", "rate_limit_exceeded"), ("drafthouse-retry-after-s", "0.01"))


def test_a_full_server_is_asked_again(serve: Serve, complete: Complete):
    service = ScriptedService(breaks=[(0, FULL)] * 2)
    assert complete(serve(service), REQUEST).usage.completion_tokens == NUM_TOKENS
    assert len(service.requests) == 3


@pytest.mark.parametrize(
    ("sent", "cause", "num_asked", "kind"),
    [
        (0, Break(), 3, UnavailableError),
        (0, FULL, 3, BusyError),
        (0, busy(("drafthouse-retry-after-s", "9")), 1, BusyError),  # the time is over by then
        (3, busy(("grpc-retry-pushback-ms", "-1")), 1, BusyError),  # it asks for no retry
    ],
    ids=["unavailable", "full", "late", "final"],
)
def test_a_server_that_makes_no_progress_is_given_up_with_its_last_error(
    serve: Serve,
    complete: Complete,
    sent: int,
    cause: Break,
    num_asked: int,
    kind: type[ClientError],
):
    service = ScriptedService(breaks=[(sent, cause)] * 10)
    with pytest.raises(kind, match=cause.details):
        complete(serve(service), REQUEST, timeout_s=3.0)
    assert len(service.requests) == num_asked


def test_a_started_answer_comes_back_as_long_as_the_server_is_full(
    serve: Serve, complete: Complete
):
    service = ScriptedService(breaks=[(2, Break()), *[(0, FULL)] * 9])
    answer = complete(serve(service), REQUEST)
    assert answer.choices[0].text == expected_text(answer.seed, 0)
    assert len(service.requests) == 11
    assert all(len(request.resume[0].token_ids) == 2 for request in service.requests[1:])


def test_an_unreachable_server_is_unavailable(complete: Complete):
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1"):
        complete("127.0.0.1:1", REQUEST)


def test_metadata_goes_with_every_call(serve: Serve, complete: Complete):
    service = ScriptedService(breaks=[(1, Break())])
    endpoint = Endpoint(serve(service), metadata=[("authorization", "Bearer token")])
    complete(endpoint, REQUEST)
    assert [sent["authorization"] for sent in service.metadata] == ["Bearer token"] * 2


def test_a_stream_that_lasts_too_long_is_ended(serve: Serve, complete: Complete):
    service = EndlessService()
    with pytest.raises(DeadlineError):
        complete(serve(service), REQUEST, timeout_s=0.5)
    assert service.client_gone.wait(PATIENCE_S)


def test_leaving_the_iteration_cancels_the_request(serve: Serve):
    service = EndlessService()
    with Client(serve(service)) as client:
        for _ in client.generate(REQUEST):
            break
        assert service.client_gone.wait(PATIENCE_S)


def test_a_stream_is_cancelled_from_another_thread(serve: Serve):
    service = EndlessService()
    with Client(serve(service)) as client, client.generate(REQUEST) as stream:
        next(stream)
        threading.Timer(0.05, stream.cancel).start()
        with pytest.raises(CancelledError):
            next(stream)
        assert service.client_gone.wait(PATIENCE_S)


def test_cancelling_ends_the_wait_for_a_retry(serve: Serve):
    service = ScriptedService(breaks=[(0, busy(("drafthouse-retry-after-s", "600")))])
    with Client(serve(service)) as client, client.generate(REQUEST) as stream:
        threading.Timer(0.2, stream.cancel).start()
        started_at = time.monotonic()
        with pytest.raises(CancelledError):
            next(stream)
        assert time.monotonic() - started_at < PATIENCE_S


async def test_leaving_the_asyncio_iteration_cancels_the_request(serve: Serve):
    service = EndlessService()
    async with AsyncClient(serve(service)) as client:
        stream = client.generate(REQUEST)
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(service.client_gone.wait, PATIENCE_S)


@pytest.mark.parametrize("error", [asyncio.CancelledError, CancelledError])
async def test_cancelling_the_task_or_closing_the_client_cancels_the_request(
    serve: Serve, error: type[BaseException]
):
    service = EndlessService()
    async with AsyncClient(serve(service)) as client:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in client.generate(REQUEST):
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        if error is CancelledError:
            await client.close()
        else:
            task.cancel()
        with pytest.raises(error):
            await task
        assert await asyncio.to_thread(service.client_gone.wait, PATIENCE_S)


AUTHORITY, OTHER = Authority.new(), Authority.new("another")
HERE, ELSEWHERE = "localhost", "llm.example.com"
CERTIFICATE, KEY = AUTHORITY.issue("somebody")
OWN = {"private_key": KEY, "certificate_chain": CERTIFICATE}


@pytest.mark.parametrize(
    ("issuer", "name", "asks", "shown", "is_answered"),
    [
        (AUTHORITY, HERE, False, {}, True),
        (OTHER, HERE, False, {}, False),
        (AUTHORITY, ELSEWHERE, False, {}, False),
        (AUTHORITY, ELSEWHERE, False, {"server_name": ELSEWHERE}, True),
        # Where the server asks for a certificate of the client's.
        (AUTHORITY, HERE, True, {}, False),
        (AUTHORITY, HERE, True, OWN, True),
    ],
    ids=["its own", "another authority", "another name", "that name", "no certificate", "shown"],
)
def test_who_answers_and_who_asks_are_checked(
    serve: Serve,
    complete: Complete,
    issuer: Authority,
    name: str,
    asks: bool,
    shown: dict[str, Any],
    is_answered: bool,
):
    certificate, key = issuer.issue(name)
    credentials = grpc.ssl_server_credentials(
        [(key, certificate)], AUTHORITY.cert if asks else None, require_client_auth=asks
    )
    service = ScriptedService()
    address = serve(service, credentials).replace("127.0.0.1", HERE)
    endpoint = Endpoint(address, tls=True, root_certificates=AUTHORITY.cert, **shown)
    if is_answered:
        assert complete(endpoint, REQUEST).usage.completion_tokens == NUM_TOKENS
        return
    with pytest.raises(UnavailableError):
        complete(endpoint, REQUEST)
    assert service.requests == []
