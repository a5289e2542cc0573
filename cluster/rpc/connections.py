"""Keeps one open link to every endpoint of a set, through crashes, restarts and rescaling."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Generic, TypeVar

from cluster.errors import DrafthouseError, ProtocolError
from cluster.records import frozen
from cluster.rpc.link import Link, end_tasks
from cluster.rpc.messages import WorkerDescription

log = logging.getLogger(__name__)

# Invariant, hence TypeVar: the concrete kind of link that `connect` opens and `use` takes.
AnyLink = TypeVar("AnyLink", bound=Link)  # type: ignore[type-arg]

_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
# Another model or version does not change by itself; its replacement has another endpoint.
_REFUSED_RETRY_S = 10.0
# A connection takes much less.
_FIRST_LINK_S = 10.0


@frozen
class Endpoint:
    """One worker.  id: unique over restarts, unlike the address, because ports are reused.

    worker_id: whom Describe must name at the address, "" accepts anyone.  refusal: why the worker
    cannot work, "" if it can; then it has no address.
    """

    id: str
    address: str
    worker_id: str = ""
    refusal: str = ""


# A set of workers that changes over time: the present one at once, the new one after every change.
Endpoints = Callable[[], AsyncIterator[frozenset[Endpoint]]]


class Connections(Generic[AnyLink]):
    """Connects to each endpoint as it appears, and again with backoff when its link ends.

    use: works with the link until it ends, and leaves nothing behind when cancelled.  An endpoint
    that has left the set is used while its link lives: Serve takes a replica out while it
    reconfigures it, and the link of one that stops ends by itself.
    """

    def __init__(
        self,
        name: str,
        endpoints: Endpoints,
        connect: Callable[[Endpoint], Awaitable[tuple[WorkerDescription, AnyLink]]],
        use: Callable[[Endpoint, WorkerDescription, AnyLink], Awaitable[None]],
    ) -> None:
        self._name = name
        self._endpoints = endpoints
        self._connect = connect
        self._use = use
        self._watcher: asyncio.Task[None] | None = None
        self._present: frozenset[Endpoint] = frozenset()
        self._keepers: dict[Endpoint, asyncio.Task[None]] = {}
        self._linked: set[Endpoint] = set()
        self._has_linked = asyncio.Event()

    def start(self) -> None:
        """Begin to watch the set; call on the event loop that is to own the links."""
        self._watcher = asyncio.create_task(self._watch(), name=f"endpoints of {self._name}")

    async def first_link(self) -> None:
        """Return once there has been a link, at the latest after some seconds.

        For a replica that takes another one's place, which Serve ends as soon as it is there."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_linked.wait(), _FIRST_LINK_S)

    async def stop(self) -> None:
        """Close every link."""
        await end_tasks(*self._keepers.values(), *([self._watcher] if self._watcher else []))

    async def _watch(self) -> None:
        wait_s = _FIRST_RETRY_S
        while True:
            try:
                async for endpoints in self._endpoints():
                    wait_s = _FIRST_RETRY_S
                    self._reconcile(endpoints)
            except Exception:  # Serve's errors have no common base; ask again
                log.warning("cannot list the replicas of %s", self._name, exc_info=True)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LAST_RETRY_S)

    def _reconcile(self, endpoints: frozenset[Endpoint]) -> None:
        self._present = endpoints
        for endpoint in set(self._keepers) - endpoints - self._linked:
            self._keepers.pop(endpoint).cancel()
        for endpoint in endpoints - set(self._keepers):
            self._keepers[endpoint] = asyncio.create_task(
                self._keep(endpoint), name=f"link to {self._name} {endpoint.id}"
            )

    async def _keep(self, endpoint: Endpoint) -> None:
        wait_s = _FIRST_RETRY_S
        refusal = ""
        while True:
            try:
                description, link = await self._connect(endpoint)
                wait_s = _FIRST_RETRY_S
                await self._hold(endpoint, description, link)
            except ProtocolError as error:
                if error.message != refusal:  # said once
                    log.error("%s %s is refused: %s", self._name, endpoint.id, error)
                refusal = error.message
                wait_s = _REFUSED_RETRY_S
            except DrafthouseError as error:
                log.info("%s %s is not reachable: %s", self._name, endpoint.id, error)
            except Exception:
                log.exception("link to %s %s failed", self._name, endpoint.id)
            if endpoint not in self._present:
                del self._keepers[endpoint]
                return
            await asyncio.sleep(wait_s)
            wait_s = max(min(2 * wait_s, _LAST_RETRY_S), wait_s)

    async def _hold(
        self, endpoint: Endpoint, description: WorkerDescription, link: AnyLink
    ) -> None:
        log.info("%s joined id=%s address=%s", self._name, endpoint.id, endpoint.address)
        self._linked.add(endpoint)
        self._has_linked.set()
        try:
            await self._use(endpoint, description, link)
        finally:
            self._linked.discard(endpoint)
            log.info("%s left id=%s", self._name, endpoint.id)
            await link.close()
