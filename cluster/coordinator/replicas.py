"""The connected drafter replicas: which there are, and which of them may be used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence

from cluster import metrics
from cluster.config.schema import CoordinatorConfig
from cluster.coordinator.engines import forget_engines, record_engines
from cluster.coordinator.idle import Availability
from cluster.coordinator.replica import DrafterLink, DrafterReplica
from cluster.coordinator.session import Seat
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.once_a_minute import OnceAMinute
from cluster.messages import WorkerDescription
from cluster.metrics.recorder import Recorder

log = logging.getLogger(__name__)


class DrafterReplicas:
    """Replicas by drafter name."""

    def __init__(self, config: CoordinatorConfig, recorder: Recorder) -> None:
        self._recorder = recorder
        self._by_name: dict[str, dict[str, DrafterReplica]] = {}
        self._inside: dict[str, Seat] = {}  # the targets that have drafters inside, by id
        self._seen: set[str] = set()
        self._refused: set[str] = set()
        self._faults: dict[str, Counter[str]] = {}
        self._said = OnceAMinute()
        self._config = config
        # By drafter, replica and model; one that a replica's former life opened stays open.
        self.breakers: dict[tuple[str, str, str], CircuitBreaker] = {}

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
        link: DrafterLink,
    ) -> DrafterReplica:
        """Take a replica in, with the breaker of its former life with the same model."""
        config = self._config
        breaker = self.breakers.setdefault(
            (name, replica_id, description.model_hash),
            CircuitBreaker(config.breaker_failures, config.breaker_reset_s),
        )
        replica = DrafterReplica(
            name, replica_id, description, link, breaker, config.max_frame_tokens
        )
        self._by_name.setdefault(name, {})[replica.id] = replica
        self._seen.add(name)
        self._refused.discard(name)
        self._recorder.set(metrics.DRAFTER_UP, len(self._by_name[name]), drafter=name)
        record_engines(self._recorder, replica_id, description)
        return replica

    def meet_residents(self, seat: Seat) -> None:
        """A target has joined, with drafters inside it."""
        self._inside[seat.id] = seat
        self._seen.update(seat.residents)
        self._count_residents(seat)

    def lose_residents(self, seat: Seat) -> None:
        """A target has left."""
        self._inside.pop(seat.id, None)
        self._count_residents(seat)

    def _count_residents(self, seat: Seat) -> None:
        for name in seat.residents:
            num_targets = sum(name in each.residents for each in self._inside.values())
            self._recorder.set(metrics.DRAFTER_UP, num_targets, drafter=name)

    def remove(self, replica: DrafterReplica, now: float, *, failed: bool) -> bool:
        """False when it was not there any more."""
        replicas = self._by_name.get(replica.name, {})
        if replicas.get(replica.id) is not replica:
            return False
        del replicas[replica.id]
        self._recorder.set(metrics.DRAFTER_UP, len(replicas), drafter=replica.name)
        replica.forget_gauges(self._recorder)
        forget_engines(self._recorder, replica.id, replica.description)
        if failed:
            self.record_fault(replica, "link", now)
        # Under new ids each start would leave a breaker behind.
        live = {(other.name, other.id, other.description.model_hash) for other in self}
        for key in [key for key, breaker in self.breakers.items() if breaker.is_history(now)]:
            if key not in live:
                del self.breakers[key]
        return True

    def count_fault(self, name: str, why: str) -> None:
        """Count a fault that says nothing of what comes next."""
        self._recorder.add(metrics.DRAFTER_FAULTS, drafter=name, why=why)
        self._faults.setdefault(name, Counter())[why] += 1

    def record_fault(self, replica: DrafterReplica, why: str, now: float, told: str = "") -> bool:
        """Count a fault.  True when the replica is to be left alone from now on.

        told: what the log is to say of it."""
        self.count_fault(replica.name, why)
        is_open = replica.breaker.record_failure(why, now)
        key = (replica.name, replica.id, why, is_open)
        if (told or is_open) and (count := self._said.is_due(key, now)):
            log.warning(
                "drafter at fault name=%s id=%s why=%s times=%d%s%s", replica.name, replica.id, why,
                count, ", left alone for a while" if is_open else "", told and f": {told}",
            )  # fmt: skip
        return is_open

    def faults(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by the drafter's name and by reason."""
        return {name: dict(counts) for name, counts in self._faults.items()}

    def left_alone(self, now: float) -> list[str]:
        """Names of the drafters none of whose replicas may be used at present."""
        return sorted(
            name
            for name, replicas in self._by_name.items()
            if replicas and not any(each.breaker.allows(now) for each in replicas.values())
        )

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
            key=lambda replica: (self.is_stalled(replica, now), replica.num_held),
            default=None,
        )

    def refuse(self, name: str) -> None:
        """A replica of this name does not fit the model."""
        self._refused.add(name)

    def availability(self, names: Sequence[str], now: float) -> Availability:
        """Count the drafters of `names` that could serve a request now."""
        return Availability(
            num_configured=len(names),
            num_usable=sum(self._is_usable(name, now) for name in names),
            num_refused=len(self._refused.intersection(names)),
            num_seen=len(self._seen.intersection(names)),
        )

    def _is_usable(self, name: str, now: float) -> bool:
        replicas = self._by_name.get(name, {}).values()
        is_inside = any(
            name in seat.residents and name not in seat.left_alone()
            for seat in self._inside.values()
        )
        return is_inside or any(replica.breaker.allows(now) for replica in replicas)

    def is_stalled(self, replica: DrafterReplica, now: float) -> bool:
        """True if it has owed an answer for too long."""
        return replica.is_stalled(now, self._config.breaker_reset_s)
