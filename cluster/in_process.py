"""Target, drafters and coordinator in one process, on one thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.rpc.link import Link, memory_pair
from cluster.worker.build import build_drafter, build_target

if TYPE_CHECKING:
    from cluster.engine.engine import Engine

log = logging.getLogger(__name__)

T = TypeVar("T")


class InProcessCluster:
    """The same classes that a cluster runs, connected by in-process links.

    The caller's own event loop (in a notebook, for example) is not touched.  torch's thread
    settings are not changed either, because they belong to the process.
    """

    def __init__(self, config: Config, engine: Engine) -> None:
        """Load the drafters and start everything.  engine: the target's, already loaded."""
        self._drafters = {name: build_drafter(config, name) for name in config.pool}
        self.target = build_target(engine, config)
        self._serving: list[asyncio.Task[None]] = []  # which the loop alone would not keep
        # The caller's thread keeps its own loop: with a factory, this one is not made its current.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        self._thread = threading.Thread(target=self._run_loop, name="drafthouse", daemon=True)
        self._thread.start()
        self.coordinator, self.leading = self.run(self._start(config))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run on the cluster's event loop and wait for the result; an interrupt cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel all tasks and end every thread."""
        self.run(self.coordinator.stop())
        self.target.stop()
        for drafter in self._drafters.values():
            drafter.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run_loop(self) -> None:
        with self._runner:  # which cancels what is left, and closes the loop
            self._loop.run_forever()

    async def _start(self, config: Config) -> tuple[Coordinator, asyncio.Future[Any]]:
        """Returns the coordinator and the task that runs while it leads the target."""
        coordinator = Coordinator(config)
        await coordinator.start()
        link = self._started(self.target)
        leading = coordinator.add_target("target", self.target.describe(), link)
        for name, drafter in self._drafters.items():
            link = self._started(drafter)
            coordinator.add_drafter(name, name, drafter.describe(), link)
        return coordinator, leading

    def _started(self, worker: Any) -> Link[Any, Any]:
        """Start a worker that serves the other end of the link."""
        worker.start()
        here, there = memory_pair()
        self._serving.append(self._loop.create_task(_served(worker, there)))
        return here


async def _served(worker: Any, link: Link[Any, Any]) -> None:
    try:
        await worker.serve(link)
    except Exception as error:  # noqa: BLE001 - what ends it is said; the others go on
        log.error("a worker has failed: %s", error)
