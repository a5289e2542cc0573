"""Where the replicas of a deployment listen: the only thing we ask Ray Serve on behalf of peers.

Every worker replica starts a gRPC server of its own and publishes its address by Serve's
`record_replica_metadata`.  Serve pushes the set of running replicas to whoever holds a handle;
`deployments.endpoints` listens in on that push, so a new replica is known without polling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.rpc.connections import Endpoint

# Where replica metadata holds the address of the replica's own gRPC server, and who listens there.
ADDRESS_KEY = "drafthouse_address"
WORKER_KEY = "drafthouse_worker_id"
# Where it holds why the replica cannot work; then it has no server.
REFUSAL_KEY = "drafthouse_refusal"


class ServeEndpoints:
    """The running replicas of the deployment that `handle` speaks to."""

    def __init__(self, handle: Any) -> None:
        """handle: Serve's, of a deployment routed by `deployments.endpoints`."""
        self._handle = handle

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        subscription = Subscription(asyncio.get_running_loop())
        try:
            # Waits for the first replica; the router sees `subscription` and keeps it up to date.
            async with self._handle.choose_replica(subscription):
                pass
            while True:
                yield await subscription.next()
        finally:
            subscription.close()


class Subscription:
    """Carries sets of endpoints from the router's thread to one event loop; the newest wins."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._changed = asyncio.Event()
        self._latest: frozenset[Endpoint] | None = None
        self._closed = False

    def publish(self, endpoints: frozenset[Endpoint]) -> bool:
        """Called from the router's thread; False when nobody listens any more."""
        if not self._closed:
            self._loop.call_soon_threadsafe(self._take, endpoints)
        return not self._closed

    def _take(self, endpoints: frozenset[Endpoint]) -> None:
        if endpoints != self._latest:
            self._latest = endpoints
            self._changed.set()

    async def next(self) -> frozenset[Endpoint]:
        await self._changed.wait()
        self._changed.clear()
        assert self._latest is not None
        return self._latest

    def close(self) -> None:
        self._closed = True


# Serve's view of one deployment's replicas, shared with subscribers.
#
# A module of its own: Serve pickles a router's module by value, so a class defined here is not
# the class of the same name that the subscriber imports.


# For Serve's RequestRouterConfig.
ROUTER_PATH = "deployments.endpoints.EndpointRouter"


class EndpointRouter(RequestRouter):  # type: ignore[misc]
    """Requests never flow through these handles; the one that does carries a Subscription."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve calls this once, after construction."""
        self._subscriptions: list[Subscription] = []

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        for argument in pending_request.args if pending_request is not None else ():
            if isinstance(argument, Subscription) and argument not in self._subscriptions:
                self._subscriptions.append(argument)
                self._publish()
        return [list(candidate_replicas)]

    def update_replicas(self, replicas: Sequence[RunningReplica]) -> None:
        """Serve pushes the new set of running replicas."""
        super().update_replicas(replicas)
        self._publish()

    def _publish(self) -> None:
        endpoints = frozenset(_endpoints(self.curr_replicas.values()))
        self._subscriptions = [one for one in self._subscriptions if one.publish(endpoints)]


def _endpoints(replicas: Iterable[Any]) -> Iterable[Endpoint]:
    for replica in replicas:
        told = replica.replica_metadata
        address, refusal = told.get(ADDRESS_KEY, ""), told.get(REFUSAL_KEY, "")
        if address or refusal:
            worker_id = told.get(WORKER_KEY, "")
            yield Endpoint(replica.replica_id.unique_id, address, worker_id, refusal)
