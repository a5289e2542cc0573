"""The events of `/ui/events`: how targets and drafters do; never a text, nor a request's name."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from cluster.coordinator.present import Stepped
from cluster.coordinator.replica import DrafterReplica
from cluster.core import Clock
from cluster.records import frozen
from cluster.rpc.messages import ProposalFrame, StepReport

_ROUNDS_EVERY_S = 0.1
_TICKS_OF_STATE, _TICKS_OF_SCORES = 10, 50
# Of one event: with numbers of any size about 20 kB.
_MAX_STEPS, _MAX_DRAFTERS = 256, 64


@frozen
class Hello:
    """The first event of every coordinator, also of one that comes later."""

    coordinator: str
    """Which one says it; so in every event. Each target's steps are told by one of them."""
    model: str
    """The served model."""
    drafters: list[str]
    """Names of those that are connected, or run inside a target."""
    targets: list[str]
    """Ids of those that are connected."""


class StepEvent(NamedTuple):
    """A step of a target, an array in this order."""

    ago_ms: float
    """How long before the event its end was known."""
    step_ms: float
    """Forward pass, draws, walks."""
    draft_ms: float
    """What drafters inside the target took before it."""
    texts: int
    """Texts that drew."""
    rows: int
    """Rows of the forward pass: texts, draft nodes and prompt tokens."""
    nodes: int
    """Draft nodes among them; 0 = a plain step."""
    accepted: int
    """Of these, how many became text."""
    why: str
    """Why it was plain, as in `drafthouse_plain_steps`; empty = it was not, or had to be."""


class Drafts(NamedTuple):
    """What a replica of the pool sent since the last event, an array in this order."""

    name: str
    """The drafter."""
    id: str
    """Its replica."""
    trees: int
    """Trees."""
    nodes: int
    """Their nodes."""
    draft_ms: float
    """Time that it says it has computed."""


@frozen
class Rounds:
    """Ten times a second, where anything happened. At most 256 steps and 64 replicas."""

    coordinator: str
    """As in `hello`."""
    at_ms: float
    """When the event was made, in milliseconds since 1970."""
    steps: Mapping[str, list[StepEvent]]
    """By the target's id."""
    drafts: list[Drafts]
    """Of the pool."""
    skipped: int
    """Steps that were too many for an event."""


@frozen
class Drafters:
    """Once a second."""

    coordinator: str
    """As in `hello`."""
    drafters: list[dict[str, Any]]
    """Each replica with its `name`, its `id` (of one inside a target, the target's), the texts that
    it drafts for (`sessions`), and its circuit `breaker`: closed, open, resting or half_open."""
    left_alone: list[str]
    """Names of those that are asked for nothing for a while."""
    refused: Mapping[str, str]
    """Why drafters take no part."""


@frozen
class State:
    """Once a second."""

    coordinator: str
    """As in `hello`."""
    running: int
    """Its requests that a target runs."""
    waiting: int
    """Its requests without a place at one."""
    targets: list[dict[str, Any]]
    """Each with its `id`, this coordinator's texts there (`sessions`), and its `load` by the texts
    of all of them: `num_running`, `num_waiting`, `num_steps`, `pages_in_use`, `pages_total`."""


@frozen
class Scores:
    """Every five seconds."""

    coordinator: str
    """As in `hello`."""
    pool: list[dict[str, Any]]
    """By drafter, `version` (with its model's hash), task and law: the `accepted` tokens that the
    best 1, 2, 4, ... nodes of a tree would have brought of late, whether they were verified or not,
    and their `calibration_error`."""
    targets: Mapping[str, list[dict[str, Any]]]
    """The same by the target's id, of the drafters inside it and of the pool's trees as a whole."""


# By the name of the event.
EVENTS: Mapping[str, type[Any]] = {
    kind.__name__.lower(): kind for kind in (Hello, Rounds, Drafters, State, Scores)
}
Event = Hello | Rounds | Drafters | State | Scores


def encoded(event: Event) -> tuple[str, str]:
    """The event's name, and its fields as JSON."""
    told = json.dumps(dataclasses.asdict(event), separators=(",", ":"))
    return type(event).__name__.lower(), told


class Watch:
    """What happened since the last event of one watcher."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._steps: deque[tuple[float, Stepped]] = deque(maxlen=_MAX_STEPS)
        self._drafts: dict[tuple[str, str], tuple[int, int, float]] = {}
        self._num_steps = 0

    def stepped(self, step: Stepped) -> None:
        """A target has made a step."""
        self._num_steps += 1
        self._steps.append((self._clock(), step))

    def drafted(self, replica: DrafterReplica, frame: ProposalFrame) -> None:
        """A replica of the pool has sent trees."""
        key = replica.name, replica.id
        if key not in self._drafts and len(self._drafts) >= _MAX_DRAFTERS:
            return
        trees, nodes, draft_ms = self._drafts.get(key, (0, 0, 0.0))
        nodes += sum(len(each.tree) for each in frame.proposals)
        trees += len(frame.proposals)
        self._drafts[key] = trees, nodes, draft_ms + 1000.0 * frame.draft_time_s

    def take(self, coordinator: str) -> Rounds | None:
        """Return the event since the last call; None = nothing has happened."""
        if not self._num_steps and not self._drafts:
            return None
        now, steps = self._clock(), dict[str, list[StepEvent]]()
        for at, step in self._steps:
            steps.setdefault(step.target_id, []).append(_step(now - at, step.report))
        skipped = self._num_steps - len(self._steps)
        drafts = [
            # JSON has no other numbers, and a drafter says whatever it likes.
            Drafts(*key, trees, nodes, round(draft_ms, 2) if math.isfinite(draft_ms) else 0.0)
            for key, (trees, nodes, draft_ms) in self._drafts.items()
        ]
        self._steps.clear()
        self._drafts, self._num_steps = {}, 0
        return Rounds(coordinator, round(1000.0 * time.time(), 1), steps, drafts, skipped)


def _step(ago_s: float, report: StepReport) -> StepEvent:
    texts, nodes = report.num_sequences, report.num_nodes
    return StepEvent(
        round(1000.0 * ago_s, 1),
        round(1000.0 * report.step_time_s, 2),
        round(1000.0 * report.draft_time_s, 2),
        texts,
        report.num_rows,
        nodes,
        max(min(report.num_emitted_tokens - texts, nodes), 0),
        report.why.name.lower() if report.why else "",
    )


class Watches(list[Watch]):
    """The watchers of one coordinator; without any, nothing is noted."""

    def __init__(
        self, model_name: str, status: Callable[[], Mapping[str, Any]], clock: Clock
    ) -> None:
        super().__init__()
        self._model_name, self._status, self._clock = model_name, status, clock

    def hear(self, steps: Sequence[Stepped]) -> None:
        for each in steps:
            for watch in self:
                watch.stepped(each)

    async def events(self) -> AsyncGenerator[tuple[str, str], None]:
        """Yield the events of one watcher, until it leaves: name and JSON."""
        watch = Watch(self._clock)
        self.append(watch)
        try:
            status = self._status()
            name = status["id"]
            drafters = sorted({each["name"] for each in status["drafters"]})
            ids = [each["id"] for each in status["targets"]]
            yield encoded(Hello(name, self._model_name, drafters, ids))
            for tick in itertools.count():
                if (rounds := watch.take(name)) is not None:
                    yield encoded(rounds)
                if tick % _TICKS_OF_STATE == 0:
                    status = self._status()
                    states = status["drafters"], status["left_alone"], status["refused"]
                    yield encoded(Drafters(name, *states))
                    numbers = status["num_running"], status["num_waiting"]
                    told = ("id", "sessions", "load")
                    targets = [{key: each[key] for key in told} for each in status["targets"]]
                    yield encoded(State(name, *numbers, targets))
                if tick % _TICKS_OF_SCORES == 0:
                    inside = {each["id"]: each.get("scores", []) for each in status["targets"]}
                    yield encoded(Scores(name, status["scores"], inside))
                await asyncio.sleep(_ROUNDS_EVERY_S)
        finally:
            self.remove(watch)
