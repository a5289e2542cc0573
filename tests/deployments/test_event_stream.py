"""Streams that wait: when their headers go out, and what keeps them open."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from cluster.config.schema import ApiConfig, Config
from cluster.text.tokenizer import Tokenizer
from tests.support.deployments.asgi import Call, call
from tests.support.deployments.place import Place, place

BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": [1, 2, 3],
    "temperature": 0,
    "max_tokens": 4,
    "ignore_eos": True,
    "stream": True,
}


@asynccontextmanager
async def held(tokenizer: Tokenizer, **limits: int) -> AsyncIterator[Place]:
    """A place whose target waits."""
    async with place(tokenizer, Config(api=ApiConfig(heartbeat_s=0.02)), **limits) as here:
        here.toy.gate.clear()
        yield here


def ask(here: Place, version: str = "1.1", **fields: Any) -> Call:
    body = json.dumps({**BODY, **fields}).encode()
    return call(here.app, "POST", "/v1/completions", body, version=version)


async def test_a_stream_that_waits_has_its_headers_and_signs_of_life(tokenizer: Tokenizer):
    async with held(tokenizer) as here:
        asked = ask(here)
        await asked.wait_for(b": waiting\n\n: waiting\n\n")
        assert asked.status == 200
        assert b"data:" not in asked.body
        here.toy.gate.set()
        await asked.wait_for(b"data: [DONE]\n\n")
        await asked.task
        assert asked.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_a_stream_that_queues_is_admitted_and_one_too_many_is_refused(
    tokenizer: Tokenizer,
):
    async with held(tokenizer, max_running_sequences=1, max_queued_requests=1) as here:
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


async def test_a_client_that_leaves_while_it_waits_frees_its_place(tokenizer: Tokenizer):
    async with held(tokenizer) as here:
        asked = ask(here)
        await asked.wait_for(b": waiting")
        assert here.rooms.coordinator.status()["num_running"] == 1
        await asked.gone()
        await here.rooms.settle()
        assert here.rooms.coordinator.status()["num_running"] == 0
        assert asked.sent[-1].get("more_body") is True  # nothing is sent to nobody


async def test_a_client_that_leaves_before_a_whole_answer_frees_its_place(
    tokenizer: Tokenizer,
):
    async with held(tokenizer) as here:
        asked = ask(here, stream=False)
        await here.wait_for_running(1)
        await asked.gone()
        await here.rooms.settle()
        assert here.rooms.coordinator.status()["num_running"] == 0
        assert asked.status == 499
