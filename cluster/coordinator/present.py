"""What a coordinator has at present, where all its parts look, and what happens there.

Those who count what happens are told once the tokens are gone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.config.schema import Config
from cluster.coordinator.session import Limits, Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import Clock, FinishReason
from cluster.messages import StepReport, TextVerdict
from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence
from cluster.records import record
from cluster.spec.acceptance import Group

E = TypeVar("E")


@record
class Asked:
    """A drafter of the pool is told of a text and asked for so many nodes.

    is_hit: what it sent before went on behind the last verdict; None = there was none yet.
    """

    drafter: str
    group: Group
    task: str
    num_nodes: int
    is_hit: bool | None


@record
class Answered:
    """A verdict was committed.  former_at: when the one before it was, None = these are the first
    tokens."""

    session: Session
    verdict: TextVerdict
    at: float
    former_at: float | None


@record
class Ended:
    """A session is over.  target_id: where it was; "" = nowhere."""

    session: Session
    reason: FinishReason
    at: float
    target_id: str


@record
class Stepped:
    """A target has made a step."""

    target_id: str
    report: StepReport


class Events:
    """Keeps what happens for its listeners; one that fails hurts nobody else."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._listeners: list[tuple[type[Any], Any, Callable[[Any], None]]] = []
        self._happened: defaultdict[type[Any], list[Any]] = defaultdict(list)

    def listen(self, kind: type[E], part: str, hear: Callable[[Sequence[E]], None]) -> None:
        """Let `hear` be told of all events of a kind.  part: its name in the metric of failures."""
        self._listeners.append((kind, Fence(self._recorder, part), hear))

    def post(self, event: object) -> None:
        self._happened[type(event)].append(event)

    def settle(self) -> None:
        """Tell of everything since the last call."""
        happened, self._happened = self._happened, defaultdict(list)
        for kind, section, hear in self._listeners:
            if kind in happened:
                with section:
                    hear(happened[kind])


@dataclass(slots=True)
class Present:
    """config: the last one that it was told.  sessions: those with a place and those that wait for
    one.  limits: what every target serves; without targets, what the last ones did.  refused: why
    drafters take no part, by name."""

    config: Config
    recorder: Recorder
    clock: Clock = time.monotonic
    sessions: dict[str, Session] = field(default_factory=dict)
    seats: dict[str, TargetSeat] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    refused: dict[str, str] = field(default_factory=dict)
    events: Events = field(init=False)

    def __post_init__(self) -> None:
        self.events = Events(self.recorder)
