"""Streams that wait: when their headers go out, and what keeps them open; and a server that stops:
nothing new begins, and what does not end in time ends with an error."""

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.schema import ApiConfig, Config, IngressConfig
from deployments.ingress.http import create_app
from deployments.ingress.openai_response import Answer
from tests.support.deployments.asgi import Call, call
from tests.support.deployments.place import BODIES, Place, generate, held, place
from tests.support.deployments.stage import toys_ingress

BEATING = Config(api=ApiConfig(heartbeat_s=0.02))


def ask(here: Place, **fields: Any) -> Call:
    asked = {
        "model": "toy",
        "prompt": [1, 2, 3],
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "stream": True,
        **fields,
    }
    return call(here.app, "POST", "/v1/completions", json.dumps(asked).encode())


async def test_a_stream_that_waits_has_its_headers_and_signs_of_life():
    async with held(BEATING) as here:
        asked = ask(here)
        await asked.wait_for(b": waiting\n\n: waiting\n\n")
        assert asked.status == 200
        assert b"data:" not in asked.body
        here.toy.gate.set()
        await asked.wait_for(b"data: [DONE]\n\n")
        await asked.task
        assert asked.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_stream_that_queues_is_admitted_and_one_too_many_is_refused():
    async with held(BEATING, max_running_sequences=1, max_queued_requests=1) as here:
        running, queued = ask(here), ask(here)
        for asked in (running, queued):
            await asked.wait_for(b": waiting")
        assert here.rooms.coordinator.status()["num_waiting"] == 1
        refused = ask(here)
        await refused.task
        assert refused.status == 429
        headers = dict(refused.sent[0]["headers"])
        assert int(headers[b"retry-after"]) >= 1
        assert len(headers[b"x-request-id"]) == 32
        here.toy.gate.set()
        for asked in (running, queued):
            await asked.wait_for(b"data: [DONE]\n\n")
            await asked.task


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_while_it_waits_frees_its_place(stream: bool):
    async with held(BEATING) as here:
        asked = ask(here, stream=stream)
        await here.wait_for_running(1)
        if stream:
            await asked.wait_for(b": waiting")
        await asked.gone()
        await here.rooms.settle()
        assert here.rooms.coordinator.status()["num_running"] == 0
        if stream:
            assert asked.sent[-1].get("more_body") is True  # nothing is sent to nobody
        else:
            assert asked.status == 499


async def test_a_stream_that_meets_a_bug_of_ours_ends_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(Answer, "chunks", None)
    async with place() as here:
        text = (await here.ask("/v1/completions", stream=True)).text
    assert "internal error" in text
    assert text.endswith("data: [DONE]\n\n")


async def test_a_client_that_leaves_before_there_is_a_coordinator_keeps_no_place():
    asked = ask(SimpleNamespace(app=create_app(toys_ingress(Config(model_name="toy")))))
    await asyncio.sleep(0.1)
    await asked.gone()
    assert asked.status == 499


AT_ONCE = Config(ingress=IngressConfig(shutdown_grace_s=0.0))


async def test_answers_that_are_under_way_may_end():
    async with held() as here:
        asked = [here.ask(path, stream=stream) for path in BODIES for stream in (False, True)]
        await here.wait_for_running(len(asked))
        draining = asyncio.create_task(here.ingress.drain())
        await here.rooms.settle()
        assert not draining.done()
        here.toy.gate.set()
        answers = await asyncio.gather(*asked)
        await draining
    assert all(answer.status_code == 200 for answer in answers)
    assert not any("stopping" in answer.text for answer in answers)


async def test_streams_that_do_not_end_are_told_so_in_the_words_of_their_api():
    async with held(AT_ONCE) as here:
        asked = {path: here.ask(path, stream=True) for path in BODIES}
        await here.wait_for_running(len(asked))
        await here.ingress.drain()
        texts = {path: (await task).text for path, task in asked.items()}
        await here.rooms.settle()
        assert here.rooms.coordinator.status()["num_running"] == 0
    for path in ("/v1/completions", "/v1/chat/completions"):
        *_, event, done = texts[path].split("\n\n")[:-1]
        assert done == "data: [DONE]"
        error = json.loads(event.removeprefix("data: "))["error"]
        assert error["code"] == "service_unavailable"
        assert "the server is stopping" in error["message"]
    *_, error_event, failed = texts["/v1/responses"].split("\n\n")[:-1]
    assert error_event.startswith("event: error\n")
    assert failed.startswith("event: response.failed\n")
    *_, last = texts["/v1/messages"].split("\n\n")[:-1]
    assert last.startswith("event: error\n")
    assert "the server is stopping" in last


@pytest.mark.parametrize("path", BODIES)
async def test_a_whole_answer_that_is_not_ready_is_503(path: str):
    async with held(AT_ONCE) as here:
        asked = here.ask(path, stream=False)
        await here.wait_for_running(1)
        await here.ingress.drain()
        answer = await asked
    assert answer.status_code == 503
    assert "the server is stopping" in answer.text
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_new_begins(path: str):
    async with held(AT_ONCE) as here:
        here.toy.gate.set()
        await here.ingress.drain()
        answer = await here.ask(path, stream=True)
        assert answer.status_code == 503
        health = await here.client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "stopping"


async def test_grpc_calls_end_with_a_status_and_watchers_are_told():
    async with held(AT_ONCE) as here, here.listening() as (channel, listener):
        reading = asyncio.ensure_future(generate(channel).read())
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        states = [(await watching.read()).status]
        await here.wait_for_running(1)
        await asyncio.gather(here.ingress.drain(), listener.stop())
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await reading
        states.append((await watching.read()).status)
        assert await watching.read() is grpc.aio.EOF
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "the server is stopping" in (ended.value.details() or "")
    serving = health_pb2.HealthCheckResponse
    assert states == [serving.SERVING, serving.NOT_SERVING]
