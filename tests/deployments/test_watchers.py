"""`/ui/events`: who may watch, how many, and whose events they are told."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.config.schema import Config, HttpConfig
from cluster.errors import WorkerError
from cluster.rpc.connections import Endpoint
from cluster.rpc.messages import WorkerDescription
from cluster.rpc.server import serve_worker
from deployments.ingress.event_stream import MAX_WATCHERS
from deployments.ingress.http import create_app
from deployments.ingress.ticket import CoordinatorPeer
from tests.deployments.test_connections import Listed
from tests.support.coordinator.house import collect, house, request
from tests.support.coordinator.toys import ToyTarget
from tests.support.deployments.asgi import PATIENCE_S, Call, call
from tests.support.deployments.place import write_keys
from tests.support.deployments.stage import toys_ingress
from tests.support.rpc.toys import stopping
from tests.support.text.tokenizers_for_tests import small_tokenizer

CONFIG = Config(model_name="toy")


def events(seen: Call, name: str) -> list[dict[str, Any]]:
    whole = seen.body.rpartition(b"\n\n")[0].decode().split("\n\n")
    start = f"event: {name}\ndata: "
    return [json.loads(each.removeprefix(start)) for each in whole if each.startswith(start)]


def coordinators(seen: Call, name: str) -> set[str]:
    return {event["coordinator"] for event in events(seen, name)}


def viewer(app: Any, key: str = "") -> Call:
    headers = [(b"x-api-key", key.encode())] if key else []
    return call(app, "GET", "/ui/events", headers=headers)


async def test_the_events_of_all_coordinators_come_in_one_stream(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(small_tokenizer(), "hash", "t")  # the toy's
    places = Listed()
    async with house(()) as first, house(()) as second, AsyncExitStack() as stack:
        ingress = toys_ingress(CONFIG, places.watch)
        ingress.start()
        stack.push_async_callback(ingress.stop)
        for stage in (first, second):
            stage.add_target(ToyTarget())
        seen = viewer(create_app(ingress))
        await seen.wait_for(b"watching")
        async with (
            stopping(await serve_worker(first.coordinator)) as one,
            stopping(await serve_worker(second.coordinator)) as other,
        ):
            servers = [one, other]
            ids = [stage.coordinator.describe().worker_id for stage in (first, second)]
            endpoints = [
                Endpoint(name, server.address, name)
                for name, server in zip(ids, servers, strict=True)
            ]
            for count in (1, 2):  # the second one comes while it is watched
                await places.say(*endpoints[:count])
                await seen.until(
                    lambda count=count: coordinators(seen, "scores") == set(ids[:count])
                )
            for stage in (first, second):
                await collect(stage.coordinator, request())
            await seen.until(lambda: coordinators(seen, "rounds") == set(ids))
            assert all(stage.coordinator._watches for stage in (first, second))
            await seen.gone()
            async with asyncio.timeout(PATIENCE_S):
                while any(stage.coordinator._watches for stage in (first, second)):
                    await first.settle()
    assert seen.status == 200
    assert coordinators(seen, "hello") == set(ids)


class Quiet:
    """A coordinator that says hello and breaks, or goes on for ever."""

    def __init__(self, *, breaks: bool = False) -> None:
        self._breaks = breaks

    async def watch(self) -> AsyncGenerator[tuple[str, str], None]:
        yield "hello", "{}"
        if self._breaks:
            raise WorkerError("gone")
        await asyncio.Event().wait()


async def test_the_ninth_is_told_why_not_and_a_place_is_free_again():
    ingress = toys_ingress(CONFIG)
    description = WorkerDescription("c", "coordinator", "c")
    for name in "ab":
        link = Quiet(breaks=name == "b")
        ingress.coordinators._peers[name] = CoordinatorPeer(name, description, link)
    app = create_app(ingress)
    seen = [viewer(app) for _ in range(MAX_WATCHERS)]
    for each in seen:
        await each.until(lambda each=each: len(events(each, "hello")) == 2)
    refused = viewer(app)
    await refused.task
    assert refused.status == 503
    assert "8 watch already" in json.loads(refused.body)["error"]["message"]
    await seen[0].gone()
    again = viewer(app)
    await again.until(lambda: bool(events(again, "hello")))
    # A server that stops ends the streams: nobody need leave.
    await ingress.drain()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(again.task, *(each.task for each in seen))
    assert {each.status for each in (again, *seen)} == {200}
    late = viewer(app)
    await late.task
    assert late.status == 503


async def test_only_operators_watch_and_only_where_the_page_is(tmp_path: Path):
    keys = write_keys(tmp_path / "keys.yaml", alice={}, root={"admin": True})
    here = replace(CONFIG, access=keys)
    for config, key, status in (
        (here, "alice", 200),  # only this machine reaches it
        (here, "", 401),
        (replace(here, http=HttpConfig(host="0.0.0.0")), "root", 404),
    ):
        app = create_app(toys_ingress(config))
        seen = viewer(app, key)
        await seen.until(lambda seen=seen: seen.status is not None)
        await seen.gone()
        assert seen.status == status
