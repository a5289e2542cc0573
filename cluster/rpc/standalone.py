"""Runs a server as its own process: a ready line, a clean end on a signal, and an exit code."""

from __future__ import annotations

import asyncio
import signal
import sys
from argparse import ArgumentParser
from collections.abc import Callable

from cluster.errors import ConfigError, DrafthouseError, NotFoundError, WorkerError
from cluster.options import port
from cluster.rpc.server import RunningServer

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_HEALTH_INTERVAL_S = 1.0
_STOP_GRACE_S = 1.0


def add_options(parser: ArgumentParser, *, listens: bool = True) -> None:
    """Add the options of every part that is started by hand."""
    add = parser.add_argument
    add("config", help="a Ray Serve config file, e.g. configs/local.yaml")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V")
    add("--log-level", default="INFO")
    if listens:
        add("--host", default="127.0.0.1", help="address to listen on")
        add("--port", type=port, default=0, help="0 = a free port")


def exit_code(run: Callable[[], None]) -> int:
    """Run a command; returns its exit code: 0 ended in order, 1 failed, 2 wrongly configured."""
    try:
        run()
    except KeyboardInterrupt:  # before the server has taken over the signals
        return 130
    except DrafthouseError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 2 if isinstance(error, (ConfigError, NotFoundError)) else 1
    return 0


async def run_until_signal(
    server: RunningServer, role: str, is_healthy: Callable[[], bool] = lambda: True
) -> None:
    """Print the address of `server`, serve until SIGTERM or SIGINT, then stop it.

    Raises WorkerError when is_healthy() becomes false, so that a supervisor starts a new process.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    sys.stdout.write(f"drafthouse {role} ready: {server.address}\n")
    sys.stdout.flush()
    try:
        while not stopped.is_set():
            if not is_healthy():
                raise WorkerError(f"the {role} is unhealthy; start a new process")
            try:
                await asyncio.wait_for(stopped.wait(), _HEALTH_INTERVAL_S)
            except TimeoutError:
                continue
    finally:
        await server.stop(_STOP_GRACE_S)
