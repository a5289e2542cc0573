"""The connected drafter replicas: which there are, and which of them may be used."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from cluster import metrics
from cluster.coordinator.idle import Availability
from cluster.coordinator.present import Present
from cluster.coordinator.replica import DrafterLink, DrafterReplica
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.once_a_minute import OnceAMinute
from cluster.messages import WorkerDescription

log = logging.getLogger(__name__)


class DrafterReplicas:
    """Replicas by drafter name.  seen: names of drafters that were here at some time."""

    def __init__(self, present: Present) -> None:
        self._present = present
        self._by_name: defaultdict[str, dict[str, DrafterReplica]] = defaultdict(dict)
        self.seen: set[str] = set()
        self._faults: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._said = OnceAMinute()
        # By drafter, replica and model; one that a replica's former life opened stays open.
        self.breakers: dict[tuple[str, str, str], CircuitBreaker] = {}

    def __iter__(self) -> Iterator[DrafterReplica]:
        for replicas in self._by_name.values():
            yield from replicas.values()

    def get(self, name: str, replica_id: str) -> DrafterReplica | None:
        return self._by_name[name].get(replica_id)

    def num_up(self, name: str) -> int:
        """Count the replicas of a drafter, and the targets that have it inside."""
        seats = self._present.seats.values()
        return len(self._by_name[name]) + sum(name in each.residents for each in seats)

    def add(
        self, name: str, replica_id: str, description: WorkerDescription, link: DrafterLink
    ) -> DrafterReplica:
        """Take a replica in, with the breaker of its former life with the same model."""
        config = self._present.config.coordinator
        breaker = self.breakers.setdefault(
            (name, replica_id, description.model_hash),
            CircuitBreaker(config.breaker_failures, config.breaker_reset_s),
        )
        replica = self._by_name[name][replica_id] = DrafterReplica(
            name,
            replica_id,
            description,
            link,
            breaker,
            config.max_frame_tokens,
            self._present.clock,
        )
        self.seen.add(name)
        return replica

    def remove(self, replica: DrafterReplica, *, failed: bool) -> bool:
        """False when it was not there any more."""
        if self.get(replica.name, replica.id) is not replica:
            return False
        del self._by_name[replica.name][replica.id]
        if failed:
            self.record_fault(replica, "link")
        # Under new ids each start would leave a breaker behind.
        now = self._present.clock()
        live = {(other.name, other.id, other.description.model_hash) for other in self}
        for key in [key for key, breaker in self.breakers.items() if breaker.is_history(now)]:
            if key not in live:
                del self.breakers[key]
        return True

    def count_fault(self, name: str, why: str) -> None:
        """Count a fault that says nothing of what comes next."""
        self._present.recorder.add(metrics.DRAFTER_FAULTS, drafter=name, why=why)
        self._faults[name][why] += 1

    def record_fault(self, replica: DrafterReplica, why: str, told: str = "") -> bool:
        """Count a fault.  True when the replica is to be left alone from now on.

        told: what the log is to say of it."""
        now = self._present.clock()
        self.count_fault(replica.name, why)
        is_open = replica.breaker.record_failure(why, now)
        key = (replica.name, replica.id, why, is_open)
        if (told or is_open) and (count := self._said.is_due(key, now)):
            log.warning(
                "drafter at fault name=%s id=%s why=%s times=%d%s%s",
                replica.name,
                replica.id,
                why,
                count,
                ", left alone for a while" if is_open else "",
                told and f": {told}",
            )
        return is_open

    def faults(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by the drafter's name and by reason."""
        return {name: dict(counts) for name, counts in self._faults.items()}

    def left_alone(self) -> list[str]:
        """Names of the drafters none of whose replicas may be used at present."""
        return [name for name, own in self._by_name.items() if own and not self._is_usable(name)]

    def pick(self, name: str, besides: DrafterReplica | None = None) -> DrafterReplica | None:
        """The least loaded replica that may be used; one that owes an answer only at need."""
        now = self._present.clock()
        usable = [
            replica
            for replica in self._by_name[name].values()
            if replica is not besides and replica.breaker.allows(now) and replica.has_room()
        ]
        return min(usable, key=lambda each: (self.is_stalled(each), each.num_held), default=None)

    def availability(self, names: Sequence[str]) -> Availability:
        """Count the drafters of `names` that could serve a request now."""
        seats = self._present.seats.values()
        inside = {
            name for seat in seats for name in seat.residents if name not in seat.left_alone()
        }
        return Availability(
            num_configured=len(names),
            num_usable=sum(name in inside or self._is_usable(name) for name in names),
            num_refused=len(self._present.refused.keys() & set(names)),
            num_seen=len(self.seen.intersection(names)),
        )

    def _is_usable(self, name: str) -> bool:
        now = self._present.clock()
        return any(replica.breaker.allows(now) for replica in self._by_name[name].values())

    def is_stalled(self, replica: DrafterReplica) -> bool:
        """True if it has owed an answer for too long."""
        patience_s = self._present.config.coordinator.breaker_reset_s
        return replica.is_stalled(patience_s)
