"""Runs a coordinator without Ray, for workers at known addresses.

    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Prints one line with its address once it is ready, and shuts down cleanly on SIGTERM.
"""

# The coordinator does not import gRPC; its links are opened here, those under Ray as well.

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from typing import Any

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.errors import ConfigError, ProtocolError
from cluster.rpc.channel import connect_drafter, connect_target
from cluster.rpc.connections import Connections, Endpoint, Endpoints
from cluster.rpc.link import Link
from cluster.rpc.messages import WorkerDescription
from cluster.rpc.server import add_options
from cluster.rpc.trust import NO_TRUST, Trust, trust_of
from cluster.worker.cli import check_in_pool, run_part, serve_until_signal
from cluster.worker.priority import lower_priority


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
            left.cancel()

    return Connections(f"drafter {name}" if name else "target", endpoints, connect, use)


def known(addresses: Sequence[str]) -> Endpoints:
    """Workers at addresses that stay."""

    async def watch() -> AsyncIterator[frozenset[Endpoint]]:
        yield frozenset(Endpoint(each, each) for each in addresses)
        await asyncio.Event().wait()

    return watch


def main(argv: Sequence[str] | None = None) -> int:
    """Run a coordinator; returns the exit code."""
    parser = ArgumentParser(
        prog="python -m cluster.lead",
        description=__doc__,
        formatter_class=RawDescriptionHelpFormatter,
    )
    add_options(parser, _lead)
    parser.add_argument("--target", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=HOST:PORT")
    return run_part(parser, argv)


async def _lead(config: Config, arguments: Namespace) -> None:
    lower_priority(config.coordinator.nice)
    trust = trust_of(config.data_plane, "coordinator")
    coordinator = Coordinator(config)
    led = [led_by(coordinator, config, known(arguments.target), trust=trust)]
    for text in arguments.drafter:
        name, _, address = text.partition("=")
        if not address:
            raise ConfigError(f"--drafter {text!r}: expected NAME=HOST:PORT")
        check_in_pool(config, name)
        led.append(led_by(coordinator, config, known([address]), name, trust))
    await coordinator.start()
    for each in led:
        each.start()
    try:
        await serve_until_signal(coordinator, "coordinator", config, arguments)
    finally:
        for each in led:
            await each.stop()
        await coordinator.stop()


if __name__ == "__main__":
    sys.exit(main())
