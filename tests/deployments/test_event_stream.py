"""Streams that wait: when their headers go out, and what keeps them open."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import ApiConfig, Config
from cluster.core import SamplingParams
from cluster.rpc.connections import Endpoint
from cluster.text.tokenizer import Tokenizer
from deployments.ingress.http import create_app
from deployments.ingress.ingress import Ingress
from tests.support.coordinator.house import House, house
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.stage import Stage
from tests.support.text.tokenizers_for_tests import byte_level_folder

BODY: dict[str, Any] = {
    "model": "toy", "prompt": [1, 2, 3], "temperature": 0, "max_tokens": 4, "ignore_eos": True,
    "stream": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    return Tokenizer.load(byte_level_folder(folder))


class Nowhere:
    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield frozenset()


@dataclass
class Call:
    """One request to the application, and what it has sent so far."""

    task: asyncio.Task[None]
    sent: list[dict[str, Any]]
    changed: asyncio.Event
    leave: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.sent if "status" in one), None)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)

    async def wait_for(self, text: bytes) -> None:
        async with asyncio.timeout(20):
            while text not in self.body:
                self.changed.clear()
                await self.changed.wait()


@dataclass
class Site:
    """The application in front of a coordinator whose target answers when `toy.gate` is open."""

    app: Any
    toy: ToyTarget
    rooms: House

    def call(self, http_version: str = "1.1", **fields: Any) -> Call:
        body = json.dumps({**BODY, **fields}).encode()
        sent: list[dict[str, Any]] = []
        changed, leave = asyncio.Event(), asyncio.Event()
        parts = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> dict[str, Any]:
            if parts:
                return parts.pop()
            await leave.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)
            changed.set()

        scope = {
            "type": "http", "method": "POST", "path": "/v1/completions", "headers": [],
            "query_string": b"", "root_path": "", "http_version": http_version,
        }  # fmt: skip
        task = asyncio.ensure_future(self.app(scope, receive, send))
        return Call(task, sent, changed, leave)


@asynccontextmanager
async def site(tokenizer: Tokenizer, **limits: int) -> AsyncIterator[Site]:
    config = Config(model_name="toy", api=ApiConfig(heartbeat_s=0.02))
    ingress = Ingress(config, tokenizer, SamplingParams(max_tokens=0), Nowhere())
    setting = Stage(ingress.coordinators)
    async with house((), **limits) as rooms:
        toy = setting.add("a", rooms)
        toy.gate.clear()
        await asyncio.sleep(0)
        try:
            yield Site(create_app(ingress), toy, rooms)
        finally:
            await setting.close()


async def test_a_stream_that_waits_has_its_headers_and_signs_of_life(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as place:
        call = place.call()
        await call.wait_for(b": waiting\n\n: waiting\n\n")
        assert call.status == 200
        assert b"data:" not in call.body
        place.toy.gate.set()
        await call.wait_for(b"data: [DONE]\n\n")
        await call.task
        assert call.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_behind_a_server_of_chunks_an_old_client_gets_its_stream_in_one_piece(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as place:
        place.toy.gate.set()
        call = place.call("1.0")
        await call.task
        start, whole = call.sent
        assert dict(start["headers"])[b"content-length"] == b"%d" % len(whole["body"])
        assert whole["body"].endswith(b"data: [DONE]\n\n")
        assert not whole.get("more_body")


async def test_a_stream_that_queues_is_admitted_and_one_too_many_is_refused(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer, max_running_sequences=1, max_queued_requests=1) as place:
        running, queued = place.call(), place.call()
        for call in (running, queued):
            await call.wait_for(b": waiting")
        assert place.rooms.coordinator.status()["num_waiting"] == 1
        refused = place.call()
        await refused.task
        assert refused.status == 429
        headers = dict(refused.sent[0]["headers"])
        assert int(headers[b"retry-after"]) >= 1
        assert len(headers[b"x-request-id"]) == 32
        place.toy.gate.set()
        for call in (running, queued):
            await call.wait_for(b"data: [DONE]\n\n")
            await call.task


async def test_a_client_that_leaves_while_it_waits_frees_its_place(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as place:
        call = place.call()
        await call.wait_for(b": waiting")
        assert place.rooms.coordinator.status()["num_running"] == 1
        call.leave.set()
        await call.task
        await place.rooms.settle()
        assert place.rooms.coordinator.status()["num_running"] == 0
        assert call.sent[-1].get("more_body") is True  # nothing is sent to nobody


async def test_a_client_that_leaves_before_a_whole_answer_frees_its_place(
    tokenizer: Tokenizer,
) -> None:
    async with site(tokenizer) as place:
        call = place.call(stream=False)
        async with asyncio.timeout(20):
            while place.rooms.coordinator.status()["num_running"] == 0:
                await place.rooms.settle()
        call.leave.set()
        await call.task
        await place.rooms.settle()
        assert place.rooms.coordinator.status()["num_running"] == 0
        assert call.status == 499


async def test_a_whole_answer_is_not_taken_for_a_lost_client(tokenizer: Tokenizer) -> None:
    async with site(tokenizer) as place:
        place.toy.gate.set()
        call = place.call(stream=False)
        await call.task
        assert call.status == 200
        assert len(json.loads(call.body)["choices"]) == 1
