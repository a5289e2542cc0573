"""Target, drafters and coordinator in one process, on one thread with its own event loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Coroutine, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.rpc.link import memory_pair
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
        self._target = build_target(engine, config)
        self._config = config
        self._serving: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="drafthouse", daemon=True
        )
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

    def reconfigure(self, user_config: Mapping[str, Any]) -> str:
        """Go on with other values of the target's live keys; returns why nothing has changed, "" if
        all has."""
        return self._target.reconfigure(self._config, user_config)

    def stop(self) -> None:
        """Cancel all tasks and end every thread."""
        self.run(self.coordinator.stop())
        self._target.stop()
        for drafter in self._drafters.values():
            drafter.stop()
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self, config: Config) -> tuple[Coordinator, asyncio.Task[None]]:
        """Returns the coordinator and the task that runs while it leads the target."""
        coordinator = Coordinator(config)
        await coordinator.start()
        self._target.start()
        here, there = memory_pair()
        self._serve(self._target.serve(there))
        leading = coordinator.add_target("target", self._target.describe(), here)
        for name, drafter in self._drafters.items():
            drafter.start()
            here, there = memory_pair()
            self._serve(drafter.serve(there))
            coordinator.add_drafter(name, name, drafter.describe(), here)
        return coordinator, leading

    def _serve(self, serving: Coroutine[Any, Any, None]) -> None:
        task = self._loop.create_task(serving)
        self._serving.add(task)
        task.add_done_callback(self._served)

    def _served(self, task: asyncio.Task[None]) -> None:
        self._serving.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a worker has failed: %s", error)

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
