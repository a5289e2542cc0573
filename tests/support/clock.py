"""Time as an argument."""

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(eq=False)
class FakeClock:
    """tick_s: what each look at it takes."""

    now: float = 1000.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def wait_until(is_so: Callable[[], object], patience_s: float = 60.0) -> None:
    """For what a thread or another process does."""
    given_up_at = time.monotonic() + patience_s
    while not is_so():
        assert time.monotonic() < given_up_at, f"not so within {patience_s:g} s"
        time.sleep(0.01)
