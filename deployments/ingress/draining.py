"""The end of an ingress: nothing new begins, and what runs ends in order, if need be by an error.

Nobody else could continue these streams: their clients are connected to this process.
"""

from __future__ import annotations

import asyncio
import logging
import weakref

from cluster.errors import UnavailableError
from deployments.ingress.generation import Generation

log = logging.getLogger(__name__)

# The last events of streams that were ended are sent within this time, or not at all.
LAST_WORDS_S = 3.0


class Draining:
    """Knows the generations that run, and ends them when asked to."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Generation] = weakref.WeakSet()
        self.has_begun = False  # from then on no generation may begin

    def watch(self, generation: Generation) -> None:
        """Take part in its end; raises UnavailableError when no new one may begin."""
        if self.has_begun:
            raise UnavailableError("the server is stopping; send the request again in a moment")
        self._known.add(generation)

    async def drain(self, grace_s: float) -> None:
        """Wait until none runs; fail those that still do after `grace_s`."""
        await self._closed_within(grace_s)
        running = self._running()
        if not running:
            return
        log.warning("stopping: %d requests are not over after %g s", len(running), grace_s)
        for generation in running:
            generation.fail(
                UnavailableError(
                    f"the server is stopping, and the answer was not over {grace_s:g} s after it "
                    "was told to; send the request again"
                )
            )
        await self._closed_within(LAST_WORDS_S)

    async def _closed_within(self, limit_s: float) -> None:
        waiting = [asyncio.ensure_future(each.closed.wait()) for each in self._running()]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=limit_s)
            for one in late:
                one.cancel()

    def _running(self) -> list[Generation]:
        return [each for each in self._known if not each.closed.is_set()]
