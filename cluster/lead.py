"""Runs a coordinator without Ray, for workers at known addresses.

    python -m cluster.lead CONFIG --target HOST:PORT --drafter NAME=HOST:PORT

Prints one line with its address once it is ready, and shuts down cleanly on SIGTERM.  This module
is separate from the coordinator because it uses gRPC, which the coordinator does not import.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence

from cluster import logs
from cluster.config.file import load
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.errors import ConfigError
from cluster.leading import led_by
from cluster.rpc.connections import Endpoint
from cluster.rpc.server import (
    LOG_FORMAT,
    add_options,
    exit_code,
    serve_coordinator,
)
from cluster.rpc.trust import trust_of
from cluster.worker.cli import serve_until_signal
from cluster.worker.priority import lower_priority


def main(argv: Sequence[str] | None = None) -> int:
    """Run a coordinator; returns the exit code."""
    arguments = _parser().parse_args(argv)
    return exit_code(lambda: _run(arguments))


def _run(arguments: argparse.Namespace) -> None:
    config = load(arguments.config, arguments.overrides).config
    logs.configure(config.log_format, LOG_FORMAT, arguments.log_level)
    asyncio.run(_lead(config, arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m cluster.lead",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(parser)
    parser.add_argument("--target", action="append", required=True, metavar="HOST:PORT")
    parser.add_argument("--drafter", action="append", default=[], metavar="NAME=HOST:PORT")
    return parser


def _drafter_address(text: str, config: Config) -> tuple[str, str]:
    name, separator, address = text.partition("=")
    if not separator or not address:
        raise ConfigError(f"--drafter {text!r}: expected NAME=HOST:PORT")
    config.check_in_pool(name)
    return name, address


async def _lead(config: Config, arguments: argparse.Namespace) -> None:
    lower_priority(config.coordinator.nice)
    trust = trust_of(config.data_plane, "coordinator")
    coordinator = Coordinator(config)
    joined = [led_by(coordinator, config, Known(arguments.target), trust=trust)]
    for text in arguments.drafter:
        name, address = _drafter_address(text, config)
        joined.append(led_by(coordinator, config, Known([address]), name, trust))
    await coordinator.start()
    for each in joined:
        each.start()
    try:
        await serve_until_signal(coordinator, serve_coordinator, "coordinator", config, arguments)
    finally:
        for each in joined:
            await each.stop()
        await coordinator.stop()


class Known:
    """Workers at addresses that stay."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = frozenset(Endpoint(each, each) for each in addresses)

    async def watch(self) -> AsyncIterator[frozenset[Endpoint]]:
        """See `Endpoints`."""
        yield self._endpoints
        await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(main())
