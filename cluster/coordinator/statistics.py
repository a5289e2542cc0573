"""What speculation did: per request, per drafter, and per round."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cluster import metrics
from cluster.core import SpeculationStats, TokenArray
from cluster.metrics import Recorder
from cluster.spec.credit import credited, owners

if TYPE_CHECKING:
    from cluster.coordinator.in_flight import InFlight

_MAX_RECENT_ROUNDS = 512


class RequestStatistics:
    """Counts for one request, in the definitions of `SpeculationStats`.

    A draft counts as accepted when the target accepted it, also where a stop token cut it off.
    """

    __slots__ = (
        "_accepted_by_drafter",
        "_first_at",
        "_histogram",
        "_last_at",
        "_num_accepted",
        "_num_drafted",
        "_num_spec_steps",
        "_num_steps",
        "_shared_by_drafter",
        "_verified_by_drafter",
        "idle_because",
    )

    def __init__(self) -> None:
        self._num_steps = 0
        self._num_spec_steps = 0
        self._num_drafted = 0
        self._num_accepted = 0
        self._histogram: list[int] = []
        self._accepted_by_drafter: Counter[str] = Counter()
        self._shared_by_drafter: Counter[str] = Counter()
        self._verified_by_drafter: Counter[str] = Counter()
        self._first_at: float | None = None
        self._last_at = 0.0
        self.idle_because = ""

    @property
    def has_speculated(self) -> bool:
        return self._num_spec_steps > 0

    def record_step(self, in_flight: InFlight, path: TokenArray, now: float) -> None:
        """One target step that emitted tokens.  path: the accepted nodes of the tree in flight."""
        self._num_steps += 1
        self._last_at = now
        if self._first_at is None:
            self._first_at = now
        num_drafted, num_accepted = len(in_flight.tree), len(path)
        if num_drafted == 0 or not in_flight.drafters:  # plain, or a part of a given output
            return
        verified = in_flight.num_proposed or (num_drafted,)
        self._verified_by_drafter.update(dict(zip(in_flight.drafters, verified, strict=False)))
        if num_accepted:
            own, shared = in_flight.credited(path)
            self._accepted_by_drafter.update(dict(zip(in_flight.drafters, own, strict=True)))
            self._shared_by_drafter.update(dict(zip(in_flight.drafters, shared, strict=True)))
        self._num_spec_steps += 1
        self._num_drafted += num_drafted
        self._num_accepted += num_accepted
        if num_accepted >= len(self._histogram):
            self._histogram.extend([0] * (num_accepted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1

    def snapshot(self) -> SpeculationStats:
        return SpeculationStats(
            num_steps=self._num_steps,
            num_spec_steps=self._num_spec_steps,
            num_draft_tokens=self._num_drafted,
            num_accepted_draft_tokens=self._num_accepted,
            acceptance_histogram=tuple(self._histogram),
            accepted_by_drafter={n: c for n, c in self._accepted_by_drafter.items() if c},
            shared_by_drafter={n: c for n, c in self._shared_by_drafter.items() if c},
            verified_by_drafter={n: c for n, c in self._verified_by_drafter.items() if c},
            idle_because=self.idle_because,
            decode_time_s=0.0 if self._first_at is None else self._last_at - self._first_at,
        )


class Attribution:
    """Counts verified trees, and credits their nodes to the drafters that proposed them.

    A node of several drafters counts for one of them (`cluster.spec.credit`), so that the counts of
    all drafters add up to the totals.  The position of an accepted node in the metrics is its
    depth, from 0.
    """

    def __init__(self) -> None:
        # Of each task: trees, their nodes, accepted ones.
        self._totals: dict[str, tuple[int, int, int]] = {}
        # How many trees were like this: (drafter, task, nodes that count for it, depths accepted of
        # those, accepted nodes of its that count for another).
        self._counts: Counter[tuple[str, str, int, Sequence[int], int]] = Counter()

    def add(self, task: str, in_flight: InFlight, path: TokenArray) -> None:
        """One verified tree.  path: its accepted nodes, root first."""
        drafters, num_nodes = in_flight.drafters, len(in_flight.tree)
        num_trees, num_drafted, num_accepted = self._totals.get(task, (0, 0, 0))
        self._totals[task] = num_trees + 1, num_drafted + num_nodes, num_accepted + len(path)
        if len(drafters) == 1:
            self._counts[drafters[0], task, num_nodes, range(len(path)), 0] += 1
            return
        proposed = in_flight.proposed()
        own, _ = credited(proposed)
        _, shared = credited(proposed[:, path])
        of_path = owners(proposed[:, path]).tolist()
        for index, drafter in enumerate(drafters):
            if in_flight.num_proposed[index]:
                accepted = tuple(depth for depth, owner in enumerate(of_path) if owner == index)
                self._counts[drafter, task, own[index], accepted, shared[index]] += 1

    def record(self, recorder: Recorder) -> None:
        for task, (num_trees, num_drafted, num_accepted) in self._totals.items():
            recorder.add(metrics.SPEC_STEPS, num_trees, task=task)
            recorder.add(metrics.DRAFT_TOKENS, num_drafted, task=task)
            recorder.add(metrics.ACCEPTED_TOKENS, num_accepted, task=task)
        for (drafter, task, num_own, accepted, num_shared), count in self._counts.items():
            labels = {"drafter": drafter, "task": task}
            recorder.add(metrics.NUM_DRAFTS, count, **labels)
            recorder.add(metrics.NUM_DRAFT_TOKENS, count * num_own, **labels)
            if accepted:
                recorder.add(metrics.NUM_ACCEPTED_TOKENS, count * len(accepted), **labels)
            if num_shared:
                recorder.add(metrics.NUM_SHARED_TOKENS, count * num_shared, **labels)
            for depth in accepted:
                recorder.add(metrics.NUM_ACCEPTED_PER_POS, count, **labels, position=str(depth))


@dataclass(frozen=True, slots=True)
class RoundTimes:
    """The timestamps of one decode round, in seconds of the coordinator's clock.

    sent_at: its verify frame was handed to the link.  received_at: its last verdict was read.
    next_sent_at: the next round's verify frame was handed over in the same call path, after a wait
    of waited_s for drafts, if one was bought.  drafted_s: what the residents took before it.
    """

    sent_at: float
    received_at: float
    next_sent_at: float
    num_sequences: int
    num_nodes: int
    step_time_s: float
    forward_time_s: float
    queue_time_s: float
    waited_s: float = 0.0
    drafted_s: float = 0.0

    @property
    def outside_s(self) -> float:
        """The whole round less forward and drafting: wire, codec, sampling, queues, coordinator."""
        return self.next_sent_at - self.sent_at - self.forward_time_s - self.drafted_s

    @property
    def coordinator_s(self) -> float:
        """From the verdict's arrival to the next frame: the coordinator's share, waits included."""
        return self.next_sent_at - self.received_at


class RecentRounds:
    """A ring of the last rounds, for status reports and benchmarks."""

    def __init__(self) -> None:
        self._rounds: deque[RoundTimes] = deque(maxlen=_MAX_RECENT_ROUNDS)

    def add(self, times: RoundTimes) -> None:
        self._rounds.append(times)

    def report(self) -> list[dict[str, float]]:
        """One plain record per round, oldest first."""
        return [
            {
                "num_sequences": times.num_sequences,
                "num_nodes": times.num_nodes,
                "step_time_s": times.step_time_s,
                "forward_time_s": times.forward_time_s,
                "queue_time_s": times.queue_time_s,
                "outside_s": times.outside_s,
                "coordinator_s": times.coordinator_s,
                "waited_s": times.waited_s,
                "round_trip_s": times.received_at - times.sent_at,
            }
            for times in self._rounds
        ]
