"""The coordinator: admits requests, opens their texts at targets, and feeds the pool's drafters.

One asyncio loop, no threads, no torch.  Workers are added and removed by whoever discovers them;
requests come from ingress links (`serve`) or from the same process (`submit`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import time
import uuid
from collections.abc import AsyncGenerator, Mapping
from functools import partial
from typing import Any

from cluster.config.schema import Config
from cluster.coordinator.audit import Auditor
from cluster.coordinator.drafters import DrafterPool
from cluster.coordinator.ingress import IngressLink
from cluster.coordinator.moment import Series, record_moment
from cluster.coordinator.present import Answered, Ended, Present, Stepped
from cluster.coordinator.replica import DrafterLink, DrafterReplica
from cluster.coordinator.sessions import SessionTable
from cluster.coordinator.switchback import Switchback
from cluster.coordinator.target_links import TargetLinks
from cluster.coordinator.targets import TargetSeat
from cluster.coordinator.watch import Watches
from cluster.coordinator.workers import (
    COORDINATOR_CONFIG,
    check_drafter,
    check_target,
    config_of,
    note_foreign,
)
from cluster.core import Clock, Request, TokenEvent
from cluster.errors import ProtocolError
from cluster.metrics.recorder import COORDINATOR, Recorder, readable, side_by_side
from cluster.plan.autoscaling import WAITING, WORTH, Statistics
from cluster.plan.fence import Fence
from cluster.rpc.link import Link, end_tasks
from cluster.rpc.messages import (
    HEARTBEAT_S,
    EventFrame,
    Load,
    StepFrame,
    SubmitFrame,
    VerdictFrame,
    WorkerDescription,
)
from cluster.spec.native import trees

log = logging.getLogger(__name__)


class Coordinator:
    """Create it inside a running event loop, `start` it, add workers, submit requests."""

    def __init__(
        self,
        config: Config,
        recorder: Recorder | None = None,
        *,
        worker_id: str | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.recorder = recorder or Recorder(only=COORDINATOR, model_name=config.model_name)
        self._id = worker_id or uuid.uuid4().hex[:12]
        present = self._present = Present(config, self.recorder, clock)
        self._rendering = Fence(self.recorder, "metrics")
        self._pool = DrafterPool(present)
        self._scores = self._pool.scores
        self._table = SessionTable(present, self._pool)
        self._targets = TargetLinks(present, self._table, self._pool)
        self._watches = Watches(config.model_name, self.status, clock)
        self._series = Series(present)
        self._auditor = Auditor(present, self._table)
        self._switchback = Switchback(config, self.recorder)
        listen = present.listen
        listen(Answered, "statistics", self._switchback.hear)
        listen(Answered, "scores", self._pool.hear)
        listen(Ended, "statistics", self._auditor.hear)
        listen(Stepped, "metrics", self._watches.hear)
        self._tasks: set[asyncio.Task[None]] = set()
        self._link_numbers = itertools.count(1)
        self._looked_at = clock()  # for targets that say nothing
        trees.is_available()  # compiles now what would be waited for when the first drafter comes

    async def start(self) -> None:
        """Start the watch over timeouts."""
        self._kept(asyncio.create_task(self._watch_forever()))

    async def stop(self) -> None:
        """Cancel every request and leave every worker."""
        self._table.cancel_all()
        await end_tasks(*self._tasks)

    async def export_learned(self) -> dict[str, Any]:
        """Return what was learned of the pool's drafters, as one record of plain values."""
        return self._scores.export()

    def restore_learned(self, state: Mapping[str, Any]) -> None:
        """Begin with what `export_learned` gave; raises for a record of another form, as
        `cluster.plan.roster` does."""
        self._scores.restore(state)

    def use(self, config: Config) -> None:
        """Go on with other values of the keys of `cluster.config.live`; what runs keeps its own."""
        for name in self._present.config.drafters.keys() - config.drafters.keys():
            self._accept(name)
        self._present.config = config
        self.refuse_config("")
        self._switchback.use(config)
        self._pool.roster.use(config, config.pool)
        self._table.admit()

    def refuse_config(self, reason: str) -> None:
        """Report that a change of the configuration was refused, until one is not."""
        self._present.refused[COORDINATOR_CONFIG] = reason

    # Workers

    def add_target(
        self, target_id: str, description: WorkerDescription, link: Link[StepFrame, VerdictFrame]
    ) -> asyncio.Task[None]:
        """Give a target work from now on; raises ProtocolError when it does not fit the others.

        Returns a task that is done when the target has left, for whatever reason: then connect
        anew.  It is cancelled where the coordinator itself leaves the target, say one that is
        silent, so wait for it by `asyncio.wait`.  A target of the same id is replaced.
        """
        self.remove_target(target_id)
        config, seats = self._present.config, self._present.seats
        check_target(description, (seat.description for seat in seats.values()))
        for replica in list(self._pool):
            try:
                check_drafter(replica.description, description)
            except ProtocolError as error:
                self.refuse_drafter(replica.name, error.message)
                self.remove_drafter(replica.name, replica.id)
        for name in description.residents:
            self._accept(name)
        for name, reason in description.refused.items():
            self.refuse_drafter(name, reason)
        for each in (description, *(replica.description for replica in self._pool)):
            note_foreign(each, description, self.recorder)
        most, page_len = config.coordinator.max_frame_tokens, config.target.engine.page_size
        seat = seats[target_id] = TargetSeat(target_id, description, link, most, page_len)
        self._pool.seen.update(description.residents)
        self._targets.update()
        log.info("target joined id=%s model=%s", target_id, description.model_hash[:12])
        self._table.admit()
        self._pool.warn_of_shared()
        who, targets = f"target id={target_id}", self._targets
        return self._kept(seat.lead(who, targets.read_all, lambda failed: targets.lose(seat)))

    def remove_target(self, target_id: str) -> None:
        """Stop using a target; its sessions move.  An unknown id is no error."""
        seat = self._present.seats.get(target_id)
        if seat is not None:
            self._targets.lose(seat)
            seat.leading.cancel()

    def add_drafter(
        self, name: str, replica_id: str, description: WorkerDescription, link: DrafterLink
    ) -> asyncio.Task[None]:
        """Add a replica to the pool of drafter `name`; like `add_target` otherwise."""
        self.remove_drafter(name, replica_id)
        target = self._present.served if self._present.seats else None
        try:
            check_drafter(description, target)
        except ProtocolError as error:
            self.refuse_drafter(name, error.message)
            raise
        self._accept(name)
        for each, why in description.refused.items():
            self._present.refused[config_of(each)] = why
        replica = self._pool.add(name, replica_id, description, link)
        log.info("drafter joined name=%s id=%s", name, replica_id)
        note_foreign(description, target, self.recorder)
        self._pool.warn_of_shared()
        who, leave = f"drafter name={name} id={replica_id}", partial(self._pool.leave, replica)
        return self._kept(replica.lead(who, self._read_proposals, leave))

    def _kept(self, task: asyncio.Task[None]) -> asyncio.Task[None]:
        """Let `stop` end the task, if it runs: that of a link does until it is closed, which is
        later than its worker is left."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def refuse_drafter(self, name: str, reason: str) -> None:
        """Report that a drafter takes no part, and why, until a replica of it joins."""
        if self._present.refused.get(name) != reason:
            log.error("drafter refused name=%s: %s", name, reason)
        self._present.refused[name] = reason

    def _accept(self, name: str) -> None:
        """Report nothing more of what a drafter, or a change of it, was refused for."""
        for what in (name, config_of(name)):
            self._present.refused.pop(what, None)

    def remove_drafter(self, name: str, replica_id: str) -> None:
        """Stop using a drafter replica; an unknown one is no error."""
        for replica in list(self._pool):
            if (replica.name, replica.id) == (name, replica_id):
                self._pool.leave(replica, failed=False)
                replica.leading.cancel()

    # Requests

    async def submit(self, request: Request) -> AsyncGenerator[TokenEvent]:
        """The events of `request`; raises RequestError or CapacityError at the first one.

        Leaving the iteration early (`aclose`) cancels the request.
        """
        events: asyncio.Queue[TokenEvent] = asyncio.Queue()
        self._table.open(request.id, request, events.put_nowait)
        try:
            while True:
                event = await events.get()
                yield event
                if event.finish_reason is not None:
                    return
        finally:
            self.cancel(request.id)

    def cancel(self, session_id: str) -> None:
        """Free a request's state everywhere; unknown and finished ones are no error."""
        self._table.cancel(session_id)

    def load(self) -> Load:
        """How busy it is."""
        return self._table.load()

    def demand(self) -> dict[str, Statistics]:
        """Return what the autoscaling of each pool drafter is to know; for one caller."""
        self._present.settle()
        waiting = self._pool.num_waiting()
        worth = self._series.worth(self._present.clock(), self._scores.acceptance)
        return {
            name: {WAITING: waiting[name], WORTH: worth[name]}
            for name in {replica.name for replica in self._pool}
        }

    async def serve(self, link: Link[EventFrame, SubmitFrame]) -> None:
        """Serve one ingress link until it ends."""
        prefix = f"{next(self._link_numbers)}/"
        await IngressLink(self._table, link, prefix, self._present).serve()

    # Reports

    def describe(self) -> WorkerDescription:
        """As its ingresses see it."""
        config, served = self._present.config, self._present.served
        return WorkerDescription(
            worker_id=self._id,
            role="coordinator",
            name=config.model_name,
            model_hash=served.model_hash,
            tokenizer_hash=served.tokenizer_hash,
            vocab_size=served.vocab_size,
            max_context_len=served.max_context_len,
            max_running_sequences=config.coordinator.max_running_sequences,
            max_batch_tokens=served.max_batch_tokens,
        )

    def render_metrics(self) -> bytes:
        """All metrics as of now, in Prometheus' text format."""
        self._present.settle()
        with self._rendering:
            self._scores.record(self.recorder)
        record_moment(self._present, self._pool)
        pages = [self.recorder.render()]
        for seat in self._present.seats.values():
            with self._rendering:
                pages.append(readable(seat.page))
        return side_by_side(pages)

    def status(self) -> dict[str, Any]:
        """A plain picture of the moment, for debugging and benchmarks."""
        seats, replicas = self._present.seats.values(), self._pool
        drafters = replicas.states()
        return {
            "id": self._id,
            "num_running": self._table.num_running,
            "num_waiting": self._table.num_waiting,
            "targets": [seat.status() for seat in seats],
            "drafters": drafters,
            "faults": replicas.all_faults(),
            "left_alone": sorted({each["name"] for each in drafters} - replicas.usable()),
            "engines": [
                {"role": each.description.role, "worker": each.id, **dataclasses.asdict(engine)}
                for each in (*seats, *replicas)
                for engine in each.description.engines
            ],
            "scores": self._scores.acceptance.table(),
            "rollouts": self._pool.roster.table(),
            "refused": {name: why for name, why in self._present.refused.items() if why},
            "recent_steps": list(self._series.recent_steps),
        }

    def watch(self) -> AsyncGenerator[tuple[str, str], None]:
        """Yield events, each with its name and as JSON (`cluster.coordinator.watch`)."""
        return self._watches.events()

    def tick(self) -> None:
        """Act on everything that is overdue; called every half second by the watch."""
        present, now = self._present, self._present.clock()
        present.settle()
        self._switchback.tick()
        # A process that was itself stopped, or starved, has heard nobody meanwhile, so no more than
        # a heartbeat's time counts.
        elapsed_s = min(now - self._looked_at, HEARTBEAT_S)
        self._looked_at = now
        for seat in list(present.seats.values()):
            if why := seat.why_leave(elapsed_s, present.config.coordinator):
                log.error("target is left id=%s: it %s", seat.id, why)
                self.remove_target(seat.id)
            else:
                seat.beat(is_plain=self._switchback.is_plain_now)
        self._table.tick(now)
        self._auditor.tick()
        self._pool.tick()
        self._series.tick(now, self.load())

    async def _read_proposals(self, replica: DrafterReplica) -> None:
        async for frame in replica.link:
            self._pool.receive(replica, frame)
            for watch in self._watches:
                watch.drafted(replica, frame)

    async def _watch_forever(self) -> None:
        while True:
            # Timeouts are multiples of seconds; nothing on the round path depends on the watch.
            await asyncio.sleep(HEARTBEAT_S / 2)
            try:
                self.tick()
            except Exception:
                # What failed is tried again; without the watch no silent worker would be noticed.
                log.exception("the watch over timeouts failed once")
