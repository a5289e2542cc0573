"""The connected drafter replicas: which there are, and which of them may be used."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from cluster import metrics
from cluster.config import CoordinatorConfig
from cluster.coordinator.breaker import BreakerBook
from cluster.coordinator.demand import are_apart
from cluster.coordinator.replica import DrafterReplica
from cluster.coordinator.session import Session
from cluster.messages import CommitFrame, ProposalFrame, WorkerDescription
from cluster.metrics import Recorder
from cluster.rpc.link import Link

log = logging.getLogger(__name__)

_BYTES_PER_TOKEN = 4


class DrafterReplicas:
    """Replicas by drafter name."""

    def __init__(self, config: CoordinatorConfig, recorder: Recorder) -> None:
        self._recorder = recorder
        self._by_name: dict[str, dict[str, DrafterReplica]] = {}
        self.breakers = BreakerBook(config.breaker_failures, config.breaker_reset_s)
        self._patience_s = config.breaker_reset_s
        # Half a frame at most, which leaves room for everything that is not tokens.
        self._max_frame_tokens = config.max_frame_bytes // (2 * _BYTES_PER_TOKEN)
        # By a target's devices and a session's drafters, for as long as no replica comes or goes.
        self._apart: dict[tuple[frozenset[str], tuple[str, ...]], tuple[str, ...]] = {}

    def __iter__(self) -> Iterator[DrafterReplica]:
        for replicas in self._by_name.values():
            yield from replicas.values()

    def get(self, name: str, replica_id: str) -> DrafterReplica | None:
        return self._by_name.get(name, {}).get(replica_id)

    def add(
        self,
        name: str,
        replica_id: str,
        description: WorkerDescription,
        link: Link[CommitFrame, ProposalFrame],
    ) -> DrafterReplica:
        """A breaker that the replica's former life opened stays open."""
        breaker = self.breakers.of(name, replica_id)
        replica = DrafterReplica(
            name, replica_id, description, link, breaker, self._max_frame_tokens
        )
        self._by_name.setdefault(name, {})[replica.id] = replica
        self._apart.clear()
        self._recorder.set(metrics.DRAFTER_UP, len(self._by_name[name]), drafter=name)
        return replica

    def remove(self, replica: DrafterReplica, now: float, *, failed: bool) -> bool:
        """False when it was not there any more."""
        replicas = self._by_name.get(replica.name, {})
        if replicas.get(replica.id) is not replica:
            return False
        del replicas[replica.id]
        self._apart.clear()
        self._recorder.set(metrics.DRAFTER_UP, len(replicas), drafter=replica.name)
        replica.forget_gauges(self._recorder)
        if failed:
            self.record_fault(replica, "link", now)
        else:
            self.breakers.left(replica.name, replica.id)
        self.breakers.forget({(other.name, other.id) for other in self}, now)
        return True

    def record_fault(self, replica: DrafterReplica, why: str, now: float) -> bool:
        """Count a fault.  True when the replica is to be left alone from now on."""
        self._recorder.add(metrics.DRAFTER_FAULTS, drafter=replica.name, why=why)
        is_open = replica.breaker.record_failure(now)
        if is_open:
            log.warning("drafter left alone name=%s id=%s why=%s", replica.name, replica.id, why)
        return is_open

    def pick(
        self, name: str, now: float, besides: DrafterReplica | None = None
    ) -> DrafterReplica | None:
        """The least loaded replica that may be used; one that owes an answer only at need."""
        usable = [
            replica
            for replica in self._by_name.get(name, {}).values()
            if replica is not besides and replica.breaker.allows(now) and replica.has_room()
        ]
        return min(
            usable,
            key=lambda replica: (self.is_stalled(replica, now), len(replica.sessions)),
            default=None,
        )

    def is_stalled(self, replica: DrafterReplica, now: float) -> bool:
        """Whether it has owed an answer for too long."""
        return replica.is_stalled(now, self._patience_s)

    def is_model(self, name: str) -> bool:
        """Whether the drafter has a network of its own."""
        replica = next(iter(self._by_name.get(name, {}).values()), None)
        return replica is not None and bool(replica.description.model_hash)

    def apart(self, session: Session) -> tuple[str, ...]:
        """The drafters of `session` all of whose replicas are apart from its target."""
        seat = session.target
        if seat is None:
            return ()
        key = (seat.devices, session.drafters)
        found = self._apart.get(key)
        if found is None:
            found = self._apart[key] = tuple(
                name
                for name in session.drafters
                if (replicas := self._by_name.get(name))
                and all(are_apart(replica, seat) for replica in replicas.values())
            )
        return found

    def status(self, now: float) -> list[dict[str, object]]:
        """A plain picture of the moment, for status reports."""
        return [
            {
                "name": replica.name,
                "id": replica.id,
                "sessions": len(replica.sessions),
                "breaker": replica.breaker.state(now),
            }
            for replica in self
        ]
