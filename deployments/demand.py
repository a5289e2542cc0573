"""Coordinators tell replicas what is asked of all of them, which no replica sees by itself.

By a call of Serve's to each replica, every second where Serve asks the replicas for it: autoscaling
goes by it, and no token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from cluster.plan.autoscaling import Statistics

log = logging.getLogger(__name__)

_PERIOD_S = 1.0
# The same where no replica was asked of late, as without autoscaling: a call costs milliseconds.
_IDLE_PERIOD_S = 10.0
# Serve asks far more often wherever it scales.
_ASKED_S = 60.0
# What a coordinator said so long ago is not true any more: it may be gone.
_VALID_S = 5.0


class Demand:
    """What coordinators have said of late, at one replica."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._said: dict[str, tuple[float, Statistics]] = {}  # by coordinator, with the time
        self._asked_at = -math.inf

    def note(self, coordinator: str, said: Statistics) -> bool:
        """A coordinator says what is asked of this replica and of all of its kind together.

        Returns True if somebody wants to know it."""
        now = self._clock()
        self._said[coordinator] = now, said
        return now - self._asked_at < _ASKED_S

    def total(self) -> dict[str, float]:
        """Return the sum over the coordinators that are there."""
        now, total = self._clock(), defaultdict[str, float](float)
        self._asked_at = now
        self._said = {
            name: (at, said) for name, (at, said) in self._said.items() if now - at < _VALID_S
        }
        for _, said in self._said.values():
            for key, value in said.items():
                total[key] += value
        return dict(total)


async def tell_forever(
    coordinator: str, demands: Callable[[], Iterable[tuple[Any, Statistics]]]
) -> None:
    """Tell replicas what is asked of them.  demands: with Serve's handles, which reach them."""
    period_s = _PERIOD_S
    while True:
        await asyncio.sleep(period_s)
        told = await asyncio.gather(
            *(_tell(handle, coordinator, said) for handle, said in demands())
        )
        period_s = _PERIOD_S if any(told) else _IDLE_PERIOD_S


async def _tell(handle: Any, coordinator: str, said: Statistics) -> bool:
    """Return True if a replica is asked for it, or none has answered."""
    try:
        answers = handle.broadcast("note_demand", coordinator, dict(said))
        found = await answers.results_async(timeout_s=_PERIOD_S, return_exceptions=True)
    except Exception as error:  # noqa: BLE001 - Serve's errors have no common base; it is told again
        log.debug("demand was not told: %s", type(error).__name__)
        return True
    return any(each is True for each in found)
