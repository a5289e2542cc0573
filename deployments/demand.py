"""Coordinators tell replicas what is asked of all of them, which no replica sees by itself.

By a call of Serve's to each replica, every two seconds: autoscaling goes by it, and no token.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from cluster.plan.autoscaling import Statistics

log = logging.getLogger(__name__)

# A call costs milliseconds, and whoever scales waits for seconds before it does.
_PERIOD_S = 2.0
# What a coordinator said so long ago is not true any more: it may be gone.
_VALID_S = 5.0


class Demand:
    """What coordinators have said of late, at one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, Statistics]] = {}  # by coordinator, with the time

    def note(self, coordinator: str, said: Statistics) -> None:
        """A coordinator says what is asked of this replica and of all of its kind together."""
        self._said[coordinator] = self._clock(), said

    def total(self) -> dict[str, float]:
        """Return the sum over the coordinators that are there."""
        now, total = self._clock(), defaultdict[str, float](float)
        for at, said in self._said.values():
            if now - at < _VALID_S:
                for key, value in said.items():
                    total[key] += value
        return dict(total)


async def tell_forever(
    coordinator: str, demands: Callable[[], Iterable[tuple[Any, Statistics]]]
) -> None:
    """Tell replicas what is asked of them.  demands: with Serve's handles, which reach them."""
    while True:
        await asyncio.sleep(_PERIOD_S)
        await asyncio.gather(*(_tell(handle, coordinator, said) for handle, said in demands()))


async def _tell(handle: Any, coordinator: str, said: Statistics) -> None:
    try:
        answers = handle.broadcast("note_demand", coordinator, dict(said))
        await answers.results_async(timeout_s=_PERIOD_S, return_exceptions=True)
    except Exception as error:  # noqa: BLE001 - Serve's errors have no common base; it is told again
        log.debug("demand was not told: %s", type(error).__name__)
