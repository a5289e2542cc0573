"""The gRPC API: generation, errors, what is logged of either API, health and reflection."""

import re
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc import StatusCode
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from cluster.client import (
    ChatMessage,
    ChatMessages,
    Client,
    FinishReason,
    GenerateRequest,
    InvalidRequestError,
    ResumedChoice,
    SamplingOptions,
    TokenIds,
)
from tests.deployments.conftest import Served, wait_until
from tests.support.deployments.api import MODEL

TOO_HOT = SamplingOptions(temperature=9.0)
GREEDY = SamplingOptions(temperature=0.0, max_tokens=24, ignore_eos=True)


def asked(text: str, sampling: SamplingOptions | None = None) -> GenerateRequest:
    return GenerateRequest(model=MODEL, text=text, sampling=sampling)


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.grpc) as client:
        yield client


@pytest.fixture
def channel(served: Served) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(served.grpc) as channel:
        yield channel


def test_http_and_grpc_give_the_same_text(client: Client, served: Served):
    pieces = list(client.generate(asked("hello", GREEDY)))
    text = "".join(choice.text for piece in pieces for choice in piece.choices)
    body = {"prompt": "hello", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    assert text == served.api.complete(**body)["text"]
    last = pieces[-1]
    assert last.usage.completion_tokens == 24
    assert 0 < last.speculative_decoding.num_steps <= 24
    assert last.choices[-1].finish_reason == FinishReason.FINISH_REASON_LENGTH


def test_a_stream_is_resumed_where_it_broke_off(client: Client):
    sampling = SamplingOptions(temperature=0.9, seed=4, max_tokens=32, ignore_eos=True)
    request = asked("hello", sampling)
    whole = [choice for piece in client.generate(request) for choice in piece.choices]
    ids = [token for choice in whole for token in choice.token_ids]
    request.resume.append(ResumedChoice(token_ids=ids[:10]))
    rest = [choice for piece in client.generate(request) for choice in piece.choices]
    assert [token for choice in rest for token in choice.token_ids] == ids[10:]
    text = "".join(choice.text for choice in whole)
    assert text.endswith("".join(choice.text for choice in rest))


UNKNOWN = GenerateRequest(model="gpt-5", text="x")
OUTSIDE = GenerateRequest(model=MODEL, tokens=TokenIds(token_ids=[999]))
BAD = [
    (UNKNOWN.SerializeToString(), StatusCode.NOT_FOUND),
    (asked("x", TOO_HOT).SerializeToString(), StatusCode.INVALID_ARGUMENT),
    (OUTSIDE.SerializeToString(), StatusCode.INVALID_ARGUMENT),
    (asked("x" * 5_000_000).SerializeToString(), StatusCode.OUT_OF_RANGE),
    # It does not reach the ingress.
    (asked("x" * 10_000_000).SerializeToString(), StatusCode.RESOURCE_EXHAUSTED),
    (b"\x0a\x02\xff\xfe", StatusCode.INVALID_ARGUMENT),
    (b"\xff\xff\xff", StatusCode.INVALID_ARGUMENT),
]


@pytest.mark.parametrize(("body", "status"), BAD)
def test_bad_input_has_the_matching_status(channel: grpc.Channel, body: bytes, status: StatusCode):
    call = channel.unary_stream("/drafthouse.v1.GenerationService/Generate")(body, timeout=120)
    with pytest.raises(grpc.RpcError):
        next(call)
    assert call.code() == status
    assert len(call.details()) > 10


def test_an_error_brings_its_code_and_field_and_leaves_no_traceback(client: Client, served: Served):
    before = errors_logged()
    with pytest.raises(InvalidRequestError, match="temperature") as caught:
        client.complete(asked("x", TOO_HOT))
    assert not caught.value.message.startswith("gRPC status")
    assert caught.value.param == "sampling.temperature"
    with pytest.raises(InvalidRequestError) as caught:
        client.complete(UNKNOWN)
    assert caught.value.code == "not_found_error"
    assert errors_logged() == before


def logs() -> dict[Path, bytes]:
    """What the logs of the session hold."""
    import ray

    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs"
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def errors_logged() -> int:
    """How often a DrafthouseError occurs in them."""
    return sum(len(re.findall(b"(?:Request|NotFound)Error", text)) for text in logs().values())


SECRET = "quartz xylophone seventy-seven"


def test_no_log_holds_prompt_text(served: Served, client: Client):
    """Neither of what is answered nor of what is refused."""
    bodies = [
        ("/v1/completions", {"prompt": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "stream": True}),
        ("/v1/completions", {"prompt": SECRET * 1000}),
        ("/v1/completions", {"prompt": SECRET, "temperature": "hot"}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": "wizard", "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [SECRET]}),
    ]
    for path, body in bodies:
        assert served.api.post(path, **body, max_tokens=4).status_code in (200, 400)
    client.complete(asked(SECRET))
    wizard = ChatMessages(messages=[ChatMessage(role="wizard", content=SECRET)])
    for refused in (GenerateRequest(model=MODEL, chat=wizard), asked(SECRET * 1000)):
        with pytest.raises(InvalidRequestError):
            client.complete(refused)
    found = logs()
    assert not [path for path, text in found.items() if b"xylophone" in text]
    assert any(b": request id=" in text for text in found.values())


def test_a_cancelled_call_frees_its_pages(channel: grpc.Channel, served: Served):
    sampling = SamplingOptions(max_tokens=4000, ignore_eos=True)
    body = asked("long", sampling)
    call = channel.unary_stream("/drafthouse.v1.GenerationService/Generate")(
        body.SerializeToString()
    )
    next(call)
    assert served.metric("drafthouse_running_requests") == 1
    call.cancel()
    wait_until(lambda: served.metric("drafthouse_running_requests") == 0)
    wait_until(lambda: served.metric("drafthouse_kv_pages_in_use") == 0)


def test_health_is_answered_for_the_server_and_the_service(channel: grpc.Channel):
    health = health_pb2_grpc.HealthStub(channel)
    serving = health_pb2.HealthCheckResponse.SERVING
    for name in ("", "drafthouse.v1.GenerationService"):
        assert health.Check(health_pb2.HealthCheckRequest(service=name)).status == serving
    with pytest.raises(grpc.RpcError) as caught:
        health.Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() == StatusCode.NOT_FOUND
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert next(watch).status == serving
    watch.cancel()


def test_reflection_shows_the_service(channel: grpc.Channel):
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    answer = next(iter(stub.ServerReflectionInfo(iter([asked]))))
    names = {service.name for service in answer.list_services_response.service}
    assert {"drafthouse.v1.GenerationService", "grpc.health.v1.Health"} <= names
    asked = reflection_pb2.ServerReflectionRequest(
        file_containing_symbol="drafthouse.v1.GenerationService"
    )
    answer = next(iter(stub.ServerReflectionInfo(iter([asked]))))
    assert answer.file_descriptor_response.file_descriptor_proto
