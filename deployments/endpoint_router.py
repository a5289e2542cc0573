"""Serve's view of one deployment's replicas, shared with subscribers.

A module of its own: Serve pickles a router's module by value, so a class defined here is not the
class of the same name that the subscriber imports.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from cluster.rpc.connections import Endpoint
from deployments.endpoints import (
    ADDRESS_KEY,
    REFUSAL_KEY,
    WORKER_KEY,
    EndpointSubscription,
)

# For Serve's RequestRouterConfig.
ROUTER_PATH = "deployments.endpoint_router.EndpointRouter"


class EndpointRouter(RequestRouter):  # type: ignore[misc]
    """Requests never flow through these handles; one that does carries an EndpointSubscription."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Serve calls this once, after construction."""
        self._subscriptions: list[EndpointSubscription] = []

    async def choose_replicas(
        self,
        candidate_replicas: Sequence[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        for argument in pending_request.args if pending_request is not None else ():
            if isinstance(argument, EndpointSubscription) and argument not in self._subscriptions:
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
