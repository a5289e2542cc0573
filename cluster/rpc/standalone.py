"""A server as a process of its own: one ready line, and an orderly end by signal."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable

from cluster.errors import WorkerError
from cluster.rpc.server import RunningServer

_HEALTH_INTERVAL_S = 1.0
_STOP_GRACE_S = 1.0


async def run_until_signal(
    server: RunningServer, role: str, is_healthy: Callable[[], bool] = lambda: True
) -> None:
    """Print where `server` listens and serve until SIGTERM or SIGINT; then stop it.

    Raises WorkerError once is_healthy() is false, so that a supervisor starts a new process.
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
                raise WorkerError(f"the {role} is past use; start a new process")
            try:
                await asyncio.wait_for(stopped.wait(), _HEALTH_INTERVAL_S)
            except TimeoutError:
                continue
    finally:
        await server.stop(_STOP_GRACE_S)
