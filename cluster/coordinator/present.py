"""What a coordinator has at present, where all its parts look, and what happens there.

Those who count what happens are told once the tokens are gone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from cluster.config.schema import Config
from cluster.coordinator.session import Session
from cluster.coordinator.targets import TargetSeat
from cluster.core import Clock, FinishReason
from cluster.metrics.recorder import Recorder
from cluster.plan.fence import Fence
from cluster.records import record
from cluster.rpc.messages import AdapterList, StepReport, TextVerdict, WorkerDescription
from cluster.spec.acceptance import Group

E = TypeVar("E")
NO_TARGET = WorkerDescription("", "target", "")


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


@dataclass(slots=True)
class Present:
    """config: the last one that it was told.  sessions: those with a place and those that wait for
    one.  served: what every target can; adapters: that all have, None = none has told its own yet;
    without targets, what it was with the last ones.  ingresses: are called with every change of the
    adapters.  refused: why drafters take no part, by name, and why a change of the configuration
    was refused, by what it was of; "" = it was not."""

    config: Config
    recorder: Recorder
    clock: Clock
    sessions: dict[str, Session] = field(default_factory=dict)
    seats: dict[str, TargetSeat] = field(default_factory=dict)
    served: WorkerDescription = NO_TARGET
    adapters: AdapterList | None = None
    ingresses: set[Callable[[], None]] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    _listeners: list[tuple[type[Any], Fence, Callable[[Any], None]]] = field(default_factory=list)
    _happened: defaultdict[type[Any], list[Any]] = field(default_factory=lambda: defaultdict(list))

    def listen(self, kind: type[E], part: str, hear: Callable[[Sequence[E]], None]) -> None:
        """Let `hear` be told of all events of a kind; if it fails, that hurts nobody else.

        part: its name in the metric of failures."""
        self._listeners.append((kind, Fence(self.recorder, part), hear))

    def post(self, event: object) -> None:
        """Keep what happens for its listeners."""
        self._happened[type(event)].append(event)

    def settle(self) -> None:
        """Tell of everything since the last call."""
        happened, self._happened = self._happened, defaultdict(list)
        for kind, section, hear in self._listeners:
            if kind in happened:
                with section:
                    hear(happened[kind])
