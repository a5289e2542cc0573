"""The end of an ingress: nothing new begins, and what runs ends in order, if need be by an error.

Nobody else could continue these streams: their clients are connected to this process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from cluster.errors import UnavailableError
from deployments.ingress.generation import Generation

log = logging.getLogger(__name__)

# The last events of streams that were ended are sent within this time, or not at all.
LAST_WORDS_S = 3.0


class Draining:
    """Knows the generations that run, and ends them when asked to."""

    def __init__(self) -> None:
        self._running: set[Generation] = set()
        self.has_begun = False  # from then on no generation may begin

    def watch(self, generation: Generation) -> None:
        """Take part in its end; raises UnavailableError when no new one may begin."""
        if self.has_begun:
            raise UnavailableError("the server is stopping; send the request again in a moment")
        self._running.add(generation)
        generation.when_closed.append(self._running.discard)

    async def drain(self, grace_s: float) -> None:
        """Wait until none runs; fail those that still do after `grace_s`."""
        await self._closed_within(grace_s)
        if not self._running:
            return
        log.warning("stopping: %d requests are not over after %g s", len(self._running), grace_s)
        for generation in self._running:
            generation.fail(
                UnavailableError(
                    f"the server is stopping, and the answer was not over {grace_s:g} s after it "
                    "was told to; send the request again"
                )
            )
        await self._closed_within(LAST_WORDS_S)

    async def _closed_within(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                for generation in tuple(self._running):
                    await generation.closed.wait()
