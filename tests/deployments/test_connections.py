"""A link to a replica lasts as long as the replica, whatever Serve lists meanwhile."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from cluster.rpc.connections import Connections, Endpoint
from cluster.rpc.messages import WorkerDescription

ONE, OTHER = Endpoint("one", "127.0.0.1:1"), Endpoint("other", "127.0.0.1:2")


class Listed:
    """Endpoints that the test sets."""

    def __init__(self) -> None:
        self.news: asyncio.Queue[frozenset[Endpoint]] = asyncio.Queue()

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        while True:
            yield await self.news.get()
            self.news.task_done()

    async def say(self, *endpoints: Endpoint) -> None:
        """Return when it has been acted upon."""
        self.news.put_nowait(frozenset(endpoints))
        await self.news.join()


class Links:
    """Links that the test ends."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Event] = {}
        self.num_opened = 0
        self.changed = asyncio.Event()

    async def connect(self, endpoint: Endpoint) -> Any:
        return WorkerDescription(endpoint.id, "drafter", ""), self

    async def use(self, endpoint: Endpoint, description: WorkerDescription, link: Any) -> None:
        self.num_opened += 1
        ended = self.open[endpoint.id] = asyncio.Event()
        self.changed.set()
        try:
            await ended.wait()
        finally:
            del self.open[endpoint.id]
            self.changed.set()

    async def close(self) -> None:
        pass

    async def until_open(self, *ids: str) -> None:
        while self.open.keys() != set(ids):
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 60)


async def test_a_link_outlives_the_absence_of_its_endpoint():
    listed, links = Listed(), Links()
    connections = Connections("drafter x", listed.watch, links.connect, links.use)
    connections.start()
    await listed.say(ONE, OTHER)
    await links.until_open("one", "other")
    await listed.say(OTHER)
    await listed.say(ONE, OTHER)
    assert links.open.keys() == {"one", "other"}
    assert links.num_opened == 2, "nobody connected anew"

    await listed.say(OTHER)
    links.open["one"].set()
    await links.until_open("other")
    links.open["other"].set()
    await links.until_open()
    await links.until_open("other")
    assert links.num_opened == 3, "the one that is gone is not asked again"
    await listed.say(ONE, OTHER)
    await links.until_open("one", "other")
    await connections.stop()


async def test_who_begins_waits_for_its_first_link():
    listed, links = Listed(), Links()
    connections = Connections("target", listed.watch, links.connect, links.use)
    connections.start()
    waiting = asyncio.create_task(connections.first_link())
    await listed.say()
    assert not waiting.done()
    await listed.say(ONE)
    await asyncio.wait_for(waiting, 60)
    assert links.open.keys() == {"one"}
    await connections.stop()
