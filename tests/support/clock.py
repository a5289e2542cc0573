"""Time as an argument."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class FakeClock:
    """tick_s: what each look at it takes."""

    now: float = 1000.0
    tick_s: float = 0.0

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now
