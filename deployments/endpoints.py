"""Where the replicas of a deployment listen: the only thing we ask Ray Serve on behalf of peers.

Every worker replica starts a gRPC server of its own and publishes its address by Serve's
`record_replica_metadata`.  Serve's controller pushes the set of running replicas to whoever listens
to it, as to its own handles, so a new replica is known without polling.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

from ray.serve._private.long_poll import LongPollClient, LongPollNamespace
from ray.serve.context import _get_global_client

from cluster.rpc.connections import Endpoint, Endpoints

# Where replica metadata holds the address of the replica's own gRPC server, and who listens there.
ADDRESS_KEY = "drafthouse_address"
WORKER_KEY = "drafthouse_worker_id"
# Where it holds why the replica cannot work; then it has no server.
REFUSAL_KEY = "drafthouse_refusal"


def running_replicas(handle: Any) -> Endpoints:
    """Those of a deployment.  handle: Serve's, which only names it."""

    async def watch() -> AsyncIterator[frozenset[Endpoint]]:
        sets = asyncio.Queue[frozenset[Endpoint]]()
        deployment = handle.deployment_id
        client = LongPollClient(
            _get_global_client()._controller,
            {
                (LongPollNamespace.DEPLOYMENT_TARGETS, deployment): lambda found: sets.put_nowait(
                    frozenset(_endpoints(found.running_replicas))
                )
            },
            asyncio.get_running_loop(),
            f"endpoints of {deployment}",
        )
        try:
            while True:
                yield await sets.get()
        finally:
            client.stop()

    return watch


def _endpoints(replicas: Iterable[Any]) -> Iterator[Endpoint]:
    for replica in replicas:
        told = replica.replica_metadata
        address, refusal = told.get(ADDRESS_KEY, ""), told.get(REFUSAL_KEY, "")
        if address or refusal:  # a replica that has told nothing can be neither reached nor named
            worker_id = told.get(WORKER_KEY, "")
            yield Endpoint(replica.replica_id.unique_id, address, worker_id, refusal)
