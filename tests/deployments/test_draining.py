"""A server that stops: nothing new begins, and what does not end in time ends with an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from cluster.client.generated import generation_pb2
from cluster.config.schema import Config, GrpcConfig, IngressConfig
from cluster.core import SamplingParams
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.grpc_api import GrpcApi
from deployments.ingress.grpc_listener import GrpcListener
from deployments.ingress.http import create_app
from deployments.ingress.ingress import Ingress
from deployments.ingress.servicers import GENERATION
from tests.deployments.conftest import free_port
from tests.deployments.test_event_stream import Nowhere
from tests.support.coordinator import toy_law, toy_target
from tests.support.coordinator.house import House, house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Stage
from tests.support.text.tokenizers_for_tests import byte_level_folder

USER = {"role": "user", "content": "hello"}
PROMPT = {"prompt": "hello", "max_tokens": 4}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": PROMPT,
    "/v1/chat/completions": {"messages": [USER], "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": [USER], "max_tokens": 4},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(byte_level_folder(folder))


@pytest.fixture(autouse=True)
def every_token(monkeypatch: pytest.MonkeyPatch, tokenizer: Tokenizer) -> Iterator[None]:
    """The toy reads whatever the tokenizer writes: conversations are texts."""
    for module in (toy_law, toy_target):
        monkeypatch.setattr(module, "VOCAB_SIZE", tokenizer.vocab_size)
    toy_law.forget()
    yield
    toy_law.forget()


@dataclass
class Place:
    """An ingress in front of a target that answers when `toy.gate` is open."""

    ingress: Ingress
    client: httpx.AsyncClient
    toy: ToyTarget
    rooms: House

    def ask(self, path: str, *, stream: bool) -> asyncio.Task[httpx.Response]:
        body = {"model": "toy", "stream": stream, **BODIES[path]}
        return asyncio.create_task(self.client.post(path, json=body))

    async def wait_for_running(self, count: int) -> None:
        async with asyncio.timeout(20):
            while self.rooms.coordinator.status()["num_running"] < count:
                await self.rooms.settle()


@asynccontextmanager
async def place(tokenizer: Tokenizer, grace_s: float) -> AsyncIterator[Place]:
    config = Config(
        model_name="toy",
        ingress=IngressConfig(shutdown_grace_s=grace_s),
        grpc=GrpcConfig(port=free_port()),
    )
    ingress = Ingress(config, tokenizer, SamplingParams(max_tokens=0), Nowhere())
    setting = Stage(ingress.coordinators)
    transport = httpx.ASGITransport(create_app(ingress))
    async with (
        house(()) as rooms,
        httpx.AsyncClient(transport=transport, base_url="http://here", timeout=60) as client,
    ):
        toy = setting.add("a", rooms)
        toy.gate.clear()
        await asyncio.sleep(0)
        try:
            yield Place(ingress, client, toy, rooms)
        finally:
            await setting.close()


async def test_answers_that_are_under_way_may_end(tokenizer: Tokenizer) -> None:
    async with place(tokenizer, 60.0) as here:
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
) -> None:
    async with place(tokenizer, 0.0) as here:
        asked = {path: here.ask(path, stream=True) for path in BODIES}
        await here.wait_for_running(len(asked))
        await here.ingress.drain()
        texts = {path: (await task).text for path, task in asked.items()}
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
async def test_a_whole_answer_that_is_not_ready_is_503(path: str, tokenizer: Tokenizer) -> None:
    async with place(tokenizer, 0.0) as here:
        asked = here.ask(path, stream=False)
        await here.wait_for_running(1)
        await here.ingress.drain()
        answer = await asked
    assert answer.status_code == 503
    assert "the server is stopping" in answer.text
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize("path", BODIES)
async def test_nothing_new_begins(path: str, tokenizer: Tokenizer) -> None:
    async with place(tokenizer, 0.0) as here:
        here.toy.gate.set()
        await here.ingress.drain()
        answer = await here.ask(path, stream=True)
        assert answer.status_code == 503
        health = await here.client.get("/health")
    assert health.status_code == 503
    assert health.json()["status"] == "stopping"


async def test_grpc_calls_end_with_a_status_and_watchers_are_told(tokenizer: Tokenizer) -> None:
    async with place(tokenizer, 0.0) as here:
        listener = GrpcListener(GrpcApi(here.ingress), here.ingress.config, 60.0)
        await listener.start()
        where = f"127.0.0.1:{here.ingress.config.grpc.port}"
        async with grpc.aio.insecure_channel(where) as channel:
            generate = channel.unary_stream(f"/{GENERATION}/Generate")
            sampling = generation_pb2.SamplingOptions(max_tokens=4)
            request = generation_pb2.GenerateRequest(model="toy", text="x", sampling=sampling)
            call = generate(request.SerializeToString())
            reading = asyncio.ensure_future(call.read())
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
