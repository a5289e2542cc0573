"""Runs a coordinator without Ray, for workers at known addresses.

    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Prints one line with its address once it is ready, and shuts down cleanly on SIGTERM.  This module
is separate from the coordinator because it uses gRPC, which the coordinator does not import.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from cluster import logs
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.errors import ConfigError, DrafthouseError, ProtocolError
from cluster.options import port
from cluster.rpc.channel import connect_drafter, connect_target
from cluster.rpc.server import serve_coordinator
from cluster.rpc.standalone import LOG_FORMAT, exit_code, run_until_signal
from cluster.rpc.trust import NO_TRUST, Trust, trust_of

log = logging.getLogger(__name__)

_FIRST_RETRY_S = 0.1
_LAST_RETRY_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a coordinator; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    config = load(arguments.config, arguments.overrides).config
    logs.configure(config.log_format, LOG_FORMAT, arguments.log_level)
    drafters = [_drafter_address(text, config) for text in arguments.drafter]
    asyncio.run(_lead(config, arguments, drafters))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.lead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="a Ray Serve config file, e.g. configs/local.yaml")
    parser.add_argument("--target", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=HOST:PORT")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="K=V")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=port, default=0, help="0 = a free port")
    parser.add_argument("--log-level", default="INFO")
    return parser


def _drafter_address(text: str, config: Config) -> tuple[str, str]:
    name, separator, address = text.partition("=")
    if not separator or not address:
        raise ConfigError(f"--drafter {text!r}: expected NAME=HOST:PORT")
    config.check_in_pool(name)
    return name, address


async def _lead(
    config: Config, arguments: argparse.Namespace, drafters: Sequence[tuple[str, str]]
) -> None:
    trust = trust_of(config.data_plane, "coordinator")
    coordinator = Coordinator(config)
    await coordinator.start()
    frame_bytes, trust = (
        config.coordinator.max_frame_bytes,
        trust_of(config.data_plane, "coordinator"),
    )
    joins: list[tuple[str, Callable[[], Awaitable[asyncio.Task[None]]]]] = [
        (address, partial(join_target, coordinator, address, frame_bytes, trust))
        for address in arguments.target
    ]
    joins += [
        (address, partial(join_drafter, coordinator, name, address, frame_bytes, trust))
        for name, address in drafters
    ]
    keepers = [asyncio.create_task(keep_joined(address, join)) for address, join in joins]
    try:
        server = await serve_coordinator(
            coordinator, arguments.host, arguments.port, max_frame_bytes=frame_bytes, trust=trust
        )
        await run_until_signal(server, "coordinator")
    finally:
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)
        await coordinator.stop()


async def join_target(
    coordinator: Coordinator, address: str, max_frame_bytes: int, trust: Trust = NO_TRUST
) -> asyncio.Task[None]:
    description, link = await connect_target(address, max_frame_bytes=max_frame_bytes, trust=trust)
    try:
        return coordinator.add_target(address, description, link)
    except ProtocolError:
        await link.close()
        raise


async def join_drafter(
    coordinator: Coordinator,
    name: str,
    address: str,
    max_frame_bytes: int,
    trust: Trust = NO_TRUST,
) -> asyncio.Task[None]:
    description, link = await connect_drafter(
        address, max_frame_bytes=max_frame_bytes, trust=trust, name=name
    )
    try:
        return coordinator.add_drafter(name, address, description, link)
    except ProtocolError:
        await link.close()
        raise


async def keep_joined(address: str, join: Callable[[], Awaitable[asyncio.Task[None]]]) -> None:
    """Join the worker at `address`; rejoin it whenever it is lost."""
    wait_s = _FIRST_RETRY_S
    while True:
        try:
            membership = await join()
            wait_s = _FIRST_RETRY_S
            await asyncio.wait({membership})
        except DrafthouseError as error:
            log.warning("worker at %s cannot join: %s", address, error.message)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, _LAST_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
