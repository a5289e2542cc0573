"""One request to an application, without a server: what it has sent so far, and a client that may
leave at any time."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.support.deployments.api import Json

PATIENCE_S = 60.0


@dataclass
class Call:
    """leave: the client goes."""

    task: asyncio.Task[None] = field(init=False)
    sent: list[Json] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def status(self) -> int | None:
        return next((one["status"] for one in self.sent if "status" in one), None)

    @property
    def body(self) -> bytes:
        return b"".join(one.get("body", b"") for one in self.sent)

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not is_so():
                self._changed.clear()
                await self._changed.wait()

    async def wait_for(self, text: bytes) -> None:
        await self.until(lambda: text in self.body)

    async def gone(self) -> None:
        self.leave.set()
        await self.task

    def keep(self, message: Json) -> None:
        self.sent.append(message)
        self._changed.set()


def call(
    app: Any,
    method: str,
    path: str,
    body: bytes = b"",
    *,
    headers: Sequence[tuple[bytes, bytes]] = (),
) -> Call:
    made, parts = Call(), [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Json:
        if parts:
            return parts.pop()
        await made.leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Json) -> None:
        made.keep(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "headers": list(headers),
        "query_string": b"",
        "root_path": "",
        "http_version": "1.1",
    }
    made.task = asyncio.ensure_future(app(scope, receive, send))
    return made
