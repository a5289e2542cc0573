"""A server that stops: nothing new begins, and what does not end in time ends with an error."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.config.schema import Config, IngressConfig
from cluster.text.tokenizer import Tokenizer
from tests.support.deployments.place import BODIES, Place, generate, place


@asynccontextmanager
async def held(tokenizer: Tokenizer, grace_s: float) -> AsyncIterator[Place]:
    """A place whose target waits."""
    config = Config(ingress=IngressConfig(shutdown_grace_s=grace_s))
    async with place(tokenizer, config) as here:
        here.toy.gate.clear()
        yield here


async def test_answers_that_are_under_way_may_end(tokenizer: Tokenizer):
    async with held(tokenizer, 60.0) as here:
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


async def test_streams_that_do_not_end_are_told_so_in_the_words_of_their_api(
    tokenizer: Tokenizer,
):
    async with held(tokenizer, 0.0) as here:
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
async def test_a_whole_answer_that_is_not_ready_is_503(path: str, tokenizer: Tokenizer):
    async with held(tokenizer, 0.0) as here:
        asked = here.ask(path, stream=False)
        await here.wait_for_running(1)
        await here.ingress.drain()
        answer = await asked
    assert answer.status_code == 503
    assert "the server is stopping" in answer.text
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_new_begins(path: str, tokenizer: Tokenizer):
    async with held(tokenizer, 0.0) as here:
        here.toy.gate.set()
        await here.ingress.drain()
        answer = await here.ask(path, stream=True)
        assert answer.status_code == 503
        health = await here.client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "stopping"


async def test_grpc_calls_end_with_a_status_and_watchers_are_told(tokenizer: Tokenizer):
    async with held(tokenizer, 0.0) as here, here.listening() as (channel, listener):
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
