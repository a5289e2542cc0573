"""What a coordinator has at present; all its parts look here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from cluster.config.schema import Config
from cluster.coordinator.events import Events
from cluster.coordinator.session import Limits, Session
from cluster.coordinator.targets import TargetSeat
from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence


@dataclass(slots=True)
class Present:
    """config: the last one that it was told.  sessions: those with a place and those that wait for
    one.  limits: what every target serves; without targets, what the last ones did.  refused: why
    drafters take no part, by name."""

    config: Config
    recorder: Recorder
    clock: Callable[[], float] = time.monotonic
    sessions: dict[str, Session] = field(default_factory=dict)
    seats: dict[str, TargetSeat] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    refused: dict[str, str] = field(default_factory=dict)
    fence: Fence = field(init=False)
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.fence = Fence(self.recorder)
        self.events = Events(self.fence)
