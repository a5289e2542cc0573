"""Where the replicas of a deployment listen: the only thing we ask Ray Serve on behalf of peers.

Every worker replica starts a gRPC server of its own and publishes its address by Serve's
`record_replica_metadata`.  Serve pushes the set of running replicas to whoever holds a handle;
`deployments.endpoint_router` listens in on that push, so a new replica is known without polling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from cluster.rpc.connections import Endpoint, Endpoints

# Where replica metadata holds the address of the replica's own gRPC server, and who listens there.
ADDRESS_KEY = "drafthouse_address"
WORKER_KEY = "drafthouse_worker_id"
# Where it holds why the replica cannot work; then it has no server.
REFUSAL_KEY = "drafthouse_refusal"


def running_replicas(handle: Any) -> Endpoints:
    """Those of a deployment.  handle: Serve's, of one routed by `deployments.endpoint_router`."""

    async def watch() -> AsyncIterator[frozenset[Endpoint]]:
        subscription = EndpointSubscription()
        try:
            # Waits for the first replica; the router sees `subscription` and keeps it up to date.
            async with handle.choose_replica(subscription):
                pass
            while True:
                yield await subscription.sets.get()
        finally:
            subscription.is_closed = True

    return watch


class EndpointSubscription:
    """Carries sets of endpoints from the router's thread to the event loop that is running."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.sets = asyncio.Queue[frozenset[Endpoint]]()
        self.is_closed = False

    def publish(self, endpoints: frozenset[Endpoint]) -> bool:
        """Called from the router's thread; False when nobody listens any more."""
        if not self.is_closed:
            self._loop.call_soon_threadsafe(self.sets.put_nowait, endpoints)
        return not self.is_closed
