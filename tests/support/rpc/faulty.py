"""A link that drops, duplicates, delays and reorders messages, by a seeded plan.

For chaos tests, in process or over gRPC; wrap both ends to disturb both directions.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from cluster.records import frozen
from cluster.rpc.link import Link


async def turns(seconds: float) -> None:
    """Time in turns of the event loop: a millisecond is one."""
    for _ in range(int(seconds * 1000)):
        await asyncio.sleep(0)


@frozen
class FaultPlan:
    """What happens to the messages of one direction; probabilities are per message.

    drop: lost.  duplicate: delivered twice.  delay: this message and all later ones are up to
    max_delay_s late.  reorder: only this message is up to max_delay_s late, so later ones overtake
    it.
    """

    seed: int
    drop: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    reorder: float = 0.0
    max_delay_s: float = 0.02


class FaultyLink:
    """Wraps a link; applies the plan to sent messages and passes received ones unchanged."""

    def __init__(
        self,
        link: Link[Any, Any],
        plan: FaultPlan,
        sleep: Callable[[float], Awaitable[None]] = turns,
    ) -> None:
        """sleep: waits for a delay; the decisions depend on the plan's seed alone."""
        self._link = link
        self._plan = plan
        self._sleep = sleep
        self._random = random.Random(plan.seed)
        self._late: set[asyncio.Task[None]] = set()

    async def send(self, message: Any) -> None:
        """Send like the wrapped link, subject to the plan's faults."""
        plan, draw = self._plan, self._random.random
        # Every message uses the same number of random draws, so that plans stay comparable.
        dropped, doubled = draw() < plan.drop, draw() < plan.duplicate
        stalled, overtaken = draw() < plan.delay, draw() < plan.reorder
        late_s = draw() * plan.max_delay_s
        if dropped:
            return
        if stalled:
            await self._sleep(late_s)
        for _ in range(2 if doubled else 1):
            if overtaken:
                self._send_later(message, late_s)
            else:
                await self._link.send(message)

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._link.__aiter__()

    async def close(self) -> None:
        """Close the link; delayed messages that were not sent yet are lost."""
        for task in self._late:
            task.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)
        await self._link.close()

    def _send_later(self, message: Any, delay_s: float) -> None:
        async def send() -> None:
            await self._sleep(delay_s)
            await self._link.send(message)

        task = asyncio.create_task(send())
        self._late.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._late.discard(task)
        if not task.cancelled():
            # If the link has closed meanwhile, the late message is lost without an error.
            task.exception()
