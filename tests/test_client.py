"""The client resumes broken streams with the same text and raises DrafthouseErrors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
import pytest

from cluster.client import (
    AsyncClient,
    Client,
    Endpoint,
    Generation,
    GenerationRequest,
    SamplingOptions,
)
from cluster.core import FinishReason, SpeculationStats, token_array
from cluster.errors import (
    CapacityError,
    ConfigError,
    DrafthouseError,
    ProtocolError,
    RequestError,
    UnavailableError,
    WorkerError,
)
from cluster.rpc.codec_generation import (
    decode_request,
    encode_response,
)
from cluster.rpc.generated import generation_pb2_grpc
from cluster.rpc.generation import (
    ChoiceDelta,
    GenerationCall,
    GenerationResponse,
    Usage,
)
from cluster.rpc.status import error_from_status, status_code, trailing_metadata

NUM_TOKENS = 12
PATIENCE_S = 20.0
Break: TypeAlias = DrafthouseError | grpc.StatusCode


def token_at(seed: int, choice: int, position: int) -> int:
    """A token as a function of seed, choice and position, like the real text."""
    return (seed * 31 + choice * 7 + position * position) % 26


@dataclass
class ScriptedService(generation_pb2_grpc.GenerationServiceServicer):
    """Sends NUM_TOKENS letters per choice; breaks streams as scripted.

    breaks: per stream the number of responses before the break and what it is; the streams after
    the script run to the end.
    """

    breaks: list[tuple[int, Break]] = field(default_factory=list)
    requests: list[GenerationRequest] = field(default_factory=list)

    def Generate(self, message: Any, context: Any) -> Iterator[Any]:
        request = decode_request(message)
        self.requests.append(request)
        scripted = self.breaks.pop(0) if self.breaks else None
        seed = request.sampling.seed or 0
        have = {choice.index: len(choice.token_ids) for choice in request.resume}
        finished = {choice.index for choice in request.resume if choice.is_finished}
        num_sent = 0
        for position in range(NUM_TOKENS):
            for choice in range(request.n):
                if choice in finished or position < have.get(choice, 0):
                    continue
                if scripted is not None and num_sent == scripted[0]:
                    stop_with(context, scripted[1])
                num_sent += 1
                yield encode_response(self._letter(seed, choice, position))
        if scripted is not None and num_sent == scripted[0]:
            stop_with(context, scripted[1])
        stats = SpeculationStats(num_spec_steps=3, num_accepted_draft_tokens=6)
        usage = Usage(5, NUM_TOKENS * request.n)
        yield encode_response(
            GenerationResponse("id", "toy", seed, usage=usage, speculative_decoding=stats)
        )

    def _letter(self, seed: int, choice: int, position: int) -> GenerationResponse:
        token = token_at(seed, choice, position)
        reason = FinishReason.LENGTH if position == NUM_TOKENS - 1 else None
        delta = ChoiceDelta(choice, chr(97 + token), token_array([token]), finish_reason=reason)
        return GenerationResponse("id", "toy", seed, (delta,))


def stop_with(context: Any, cause: Break) -> None:
    if isinstance(cause, DrafthouseError):
        context.set_trailing_metadata(trailing_metadata(cause))
        context.abort(status_code(cause), cause.message)
    context.abort(cause, "scripted")


@pytest.fixture
def serve() -> Iterator[Callable[[ScriptedService], str]]:
    """Serve a script; returns its address."""
    servers = []

    def start(service: ScriptedService) -> str:
        server = grpc.server(ThreadPoolExecutor(max_workers=4))
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(service, server)
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(0).wait()


def complete_blocking(address: str, request: GenerationRequest) -> Generation:
    with Client(address, max_retries=2) as client:
        return client.complete(request, timeout_s=60.0)


def complete_asyncio(address: str, request: GenerationRequest) -> Generation:
    async def run() -> Generation:
        async with AsyncClient(address, max_retries=2) as client:
            return await client.complete(request, timeout_s=60.0)

    return asyncio.run(run())


both_clients = pytest.mark.parametrize("complete", [complete_blocking, complete_asyncio])
Complete = Callable[[str, GenerationRequest], Generation]


def expected_text(seed: int, choice: int) -> str:
    return "".join(chr(97 + token_at(seed, choice, position)) for position in range(NUM_TOKENS))


@both_clients
def test_an_unbroken_stream_gives_text_usage_and_statistics(
    serve: Callable[[ScriptedService], str], complete: Complete
) -> None:
    service = ScriptedService()
    request = GenerationRequest("toy", "prompt", SamplingOptions(seed=9), n=2)
    generation = complete(serve(service), request)
    assert [choice.text for choice in generation.choices] == [
        expected_text(9, 0),
        expected_text(9, 1),
    ]
    assert [choice.finish_reason for choice in generation.choices] == [FinishReason.LENGTH] * 2
    assert generation.choices[1].token_ids.tolist() == [
        token_at(9, 1, position) for position in range(NUM_TOKENS)
    ]
    assert generation.usage == Usage(5, 2 * NUM_TOKENS)
    assert generation.speculative_decoding is not None
    assert generation.speculative_decoding.mean_acceptance_length == 3.0
    assert len(service.requests) == 1


@both_clients
@pytest.mark.parametrize(
    "cause",
    [
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.INTERNAL,
        WorkerError("replica died"),
        UnavailableError("no replica", retry_after_s=0.0),
    ],
    ids=str,
)
def test_a_broken_stream_is_resumed_with_the_same_text(
    serve: Callable[[ScriptedService], str], complete: Complete, cause: Break
) -> None:
    service = ScriptedService(breaks=[(5, cause), (0, cause), (16, cause), (3, cause)])
    generation = complete(serve(service), GenerationRequest("toy", "prompt", n=2))
    seed = generation.seed
    assert [choice.text for choice in generation.choices] == [
        expected_text(seed, 0),
        expected_text(seed, 1),
    ]
    assert len(service.requests) > 2
    assert {request.sampling.seed for request in service.requests} == {seed}
    assert [len(choice.token_ids) for choice in service.requests[1].resume] == [3, 2]


@both_clients
def test_a_stream_that_breaks_between_the_last_token_and_the_usage_is_finished(
    serve: Callable[[ScriptedService], str], complete: Complete
) -> None:
    service = ScriptedService(breaks=[(NUM_TOKENS, grpc.StatusCode.UNAVAILABLE)])
    generation = complete(serve(service), GenerationRequest("toy", "p", SamplingOptions(seed=1)))
    assert generation.choices[0].text == expected_text(1, 0)
    assert generation.usage.completion_tokens == NUM_TOKENS
    assert service.requests[1].resume[0].is_finished


@both_clients
def test_a_server_without_progress_is_given_up(
    serve: Callable[[ScriptedService], str], complete: Complete
) -> None:
    service = ScriptedService(breaks=[(0, WorkerError("still dead"))] * 10)
    with pytest.raises(WorkerError, match="still dead"):
        complete(serve(service), GenerationRequest("toy", "prompt"))
    assert len(service.requests) == 3


@both_clients
@pytest.mark.parametrize(
    "error",
    [
        RequestError("temperature is -1; use 0 or more", param="temperature"),
        CapacityError("too many requests", retry_after_s=7.0),
        ProtocolError("skew"),
    ],
    ids=lambda error: error.code,
)
def test_errors_that_a_retry_cannot_fix_are_raised_at_once(
    serve: Callable[[ScriptedService], str], complete: Complete, error: DrafthouseError
) -> None:
    service = ScriptedService(breaks=[(0, error)])
    with pytest.raises(type(error)) as raised:
        complete(serve(service), GenerationRequest("toy", "prompt"))
    assert type(raised.value) is type(error)
    assert (raised.value.message, raised.value.param) == (error.message, error.param)
    if isinstance(raised.value, CapacityError):
        assert raised.value.retry_after_s == 7.0
    assert len(service.requests) == 1


@both_clients
def test_a_started_request_retries_as_long_as_the_server_is_full(
    serve: Callable[[ScriptedService], str], complete: Complete
) -> None:
    full = CapacityError("too many requests", retry_after_s=0.01)
    service = ScriptedService(breaks=[(2, grpc.StatusCode.UNAVAILABLE), *[(0, full)] * 9])
    generation = complete(serve(service), GenerationRequest("toy", "prompt"))
    assert generation.choices[0].text == expected_text(generation.seed, 0)
    assert len(service.requests) == 11
    assert all(len(request.resume[0].token_ids) == 2 for request in service.requests[1:])


@both_clients
def test_an_unreachable_server_is_unavailable(complete: Complete) -> None:
    with pytest.raises(UnavailableError):
        complete("127.0.0.1:1", GenerationRequest("toy", "prompt"))


class EndlessService(generation_pb2_grpc.GenerationServiceServicer):
    """Sends one letter and then waits for its client to go."""

    def __init__(self) -> None:
        self.client_gone = threading.Event()

    def Generate(self, _message: Any, context: Any) -> Iterator[Any]:
        context.add_callback(self.client_gone.set)
        letter = ChoiceDelta(0, "a", token_array([0]))
        yield encode_response(GenerationResponse("id", "toy", 1, (letter,)))
        self.client_gone.wait(PATIENCE_S)


def test_leaving_the_iteration_cancels_the_request(serve: Callable[[Any], str]) -> None:
    service = EndlessService()
    with Client(serve(service)) as client:
        for _ in client.generate(GenerationRequest("toy", "prompt")):
            break
        assert service.client_gone.wait(PATIENCE_S)


async def test_leaving_the_asyncio_iteration_cancels_the_request(
    serve: Callable[[Any], str],
) -> None:
    service = EndlessService()
    async with AsyncClient(serve(service)) as client:
        stream = client.generate(GenerationRequest("toy", "prompt"))
        await anext(stream)
        await stream.aclose()
        assert await asyncio.to_thread(service.client_gone.wait, PATIENCE_S)


def test_a_timeout_raises_the_last_error(
    serve: Callable[[ScriptedService], str],
) -> None:
    service = ScriptedService(breaks=[(0, UnavailableError("full", retry_after_s=5.0))] * 9)
    with Client(serve(service)) as client, pytest.raises(UnavailableError, match="full"):
        client.complete(GenerationRequest("toy", "prompt"), timeout_s=2.0)
    assert len(service.requests) == 1


@pytest.mark.parametrize("seed", [None, -1])
def test_a_seed_is_drawn_where_none_is_asked_for(seed: int | None) -> None:
    asked = GenerationRequest("toy", "prompt", sampling=SamplingOptions(seed=seed))
    drawn = [GenerationCall(asked).request().sampling.seed for _ in range(50)]
    assert all(each is not None and 0 <= each < 2**53 for each in drawn)
    assert len(set(drawn)) == 50


def test_a_seed_of_64_bits_is_sent_as_it_is() -> None:
    asked = GenerationRequest("toy", "prompt", sampling=SamplingOptions(seed=2**64 - 1))
    assert GenerationCall(asked).request().sampling.seed == 2**64 - 1


def test_a_choice_not_requested_is_a_protocol_error() -> None:
    call = GenerationCall(GenerationRequest("toy", "prompt"))
    with pytest.raises(ProtocolError, match="choice 3"):
        call.accept(GenerationResponse("id", "toy", 1, (ChoiceDelta(3, "x"),)))


def test_progress_resets_the_retries_for_broken_streams() -> None:
    call = GenerationCall(GenerationRequest("toy", "prompt"), max_retries=1)
    broken = WorkerError("broken")
    letter = ChoiceDelta(0, "x", token_array([1]))
    for _ in range(5):
        assert call.delay_after(broken) > 0.0
        call.accept(GenerationResponse("id", "toy", 1, (letter,)))
    call.delay_after(broken)
    with pytest.raises(WorkerError):
        call.delay_after(broken)


def test_a_message_that_a_proxy_finds_too_large_is_not_sent_again() -> None:
    call = GenerationCall(GenerationRequest("toy", "prompt"))
    call.accept(GenerationResponse("id", "toy", 1, (ChoiceDelta(0, "x", token_array([1])),)))
    with pytest.raises(CapacityError):
        call.delay_after(error_from_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large", {}))


def test_root_certificates_without_tls_are_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="tls"):
        Endpoint("host:1", root_certificates=b"pem")
