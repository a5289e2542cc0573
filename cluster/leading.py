"""A coordinator's links to its workers: how it comes to lead them, under Ray and by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.errors import ProtocolError
from cluster.messages import WorkerDescription
from cluster.rpc.channel import connect_drafter, connect_target
from cluster.rpc.connections import Connections, Endpoint, Endpoints
from cluster.rpc.link import Link
from cluster.rpc.trust import NO_TRUST, Trust


def led_by(
    coordinator: Coordinator,
    config: Config,
    endpoints: Endpoints,
    name: str = "",
    trust: Trust = NO_TRUST,
    *,
    look_at: Callable[[WorkerDescription], None] | None = None,
) -> Connections[Link[Any, Any]]:
    """Connections by which `coordinator` leads the workers at `endpoints`, not yet started.

    name: of the drafter that they are, "" = targets.  look_at: is shown each before it is led."""
    connect_any = partial(connect_drafter, name=name) if name else connect_target
    add = partial(coordinator.add_drafter, name) if name else coordinator.add_target
    remove = partial(coordinator.remove_drafter, name) if name else coordinator.remove_target

    async def connect(endpoint: Endpoint) -> tuple[WorkerDescription, Link[Any, Any]]:
        if endpoint.refusal:
            coordinator.refuse_drafter(name, endpoint.refusal)
            raise ProtocolError(endpoint.refusal)
        return await connect_any(
            endpoint.address,
            worker_id=endpoint.worker_id,
            max_frame_bytes=config.coordinator.max_frame_bytes,
            trust=trust,
        )

    async def use(endpoint: Endpoint, description: WorkerDescription, link: Link[Any, Any]) -> None:
        if look_at is not None:
            look_at(description)
        left = add(endpoint.id, description, link)
        try:
            await asyncio.wait({left})  # not its outcome: it is cancelled where we leave
        finally:
            remove(endpoint.id)

    return Connections(f"drafter {name}" if name else "target", endpoints, connect, use)
