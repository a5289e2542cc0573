"""An engine on a machine as slow as a test wants it, by a virtual clock."""

from typing import Any

from cluster.engine.engine import Engine
from cluster.engine.schedule.batch import Pick
from tests.support.clock import FakeClock

# Seconds of a step, and of a row of it: 130 prompt tokens a second, as on two slow cores.
SLOW = 0.02, 0.0075


def slow_down(engine: Engine, costs: tuple[float, float]) -> FakeClock:
    """Let forward passes take what they cost by the engine's own clock, which is returned.

    costs: seconds of a step, and of each of its rows."""
    clock, forward = FakeClock(0.0), engine.forward

    def slowed(picks: list[Pick], *others: Any) -> object:
        clock.now += costs[0] + costs[1] * sum(pick.num_rows for pick in picks)
        return forward(picks, *others)

    engine._clock = clock
    slowed.timed = forward.timed
    engine.forward = slowed
    return clock
