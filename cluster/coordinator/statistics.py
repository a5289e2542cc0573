"""The effect of speculation: per request, and per drafter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster import metrics
from cluster.core import SpeculationStats
from cluster.messages import TextVerdict
from cluster.metrics.recorder import Recorder


@dataclass(slots=True)
class RequestStatistics:
    """Counts for one request, in the definitions of `SpeculationStats`.

    A draft counts as accepted when the target accepted it, also where a stop token cut it off.
    """

    idle_because: str = ""
    _num_steps: int = 0
    _num_spec_steps: int = 0
    _num_drafted: int = 0
    _num_accepted: int = 0
    _histogram: list[int] = field(default_factory=list)
    # By the number of the drafter.
    _accepted: Counter[int] = field(default_factory=Counter)
    _shared: Counter[int] = field(default_factory=Counter)
    _verified: Counter[int] = field(default_factory=Counter)
    first_at: float | None = None  # of its verdicts
    last_at: float = 0.0

    @property
    def has_speculated(self) -> bool:
        return self._num_spec_steps > 0

    def record_step(self, verdict: TextVerdict, now: float) -> None:
        """One target step that emitted tokens."""
        self._num_steps += 1
        self.last_at = now
        if self.first_at is None:
            self.first_at = now
        if verdict.num_nodes == 0:
            return
        num_accepted = len(verdict.sources)
        self._verified.update(dict(enumerate(verdict.verified)))
        self._accepted.update(verdict.owners)
        for bits, owner in zip(verdict.sources.tolist(), verdict.owners, strict=True):
            self._shared.update(place for place in _places(bits) if place != owner)
        self._num_spec_steps += 1
        self._num_drafted += verdict.num_nodes
        self._num_accepted += num_accepted
        if num_accepted >= len(self._histogram):
            self._histogram.extend([0] * (num_accepted + 1 - len(self._histogram)))
        self._histogram[num_accepted] += 1

    def snapshot(self, names: Sequence[str]) -> SpeculationStats:
        """names: of the request's drafters, as its verdicts number them."""
        return SpeculationStats(
            num_steps=self._num_steps,
            num_spec_steps=self._num_spec_steps,
            num_draft_tokens=self._num_drafted,
            num_accepted_draft_tokens=self._num_accepted,
            acceptance_histogram=tuple(self._histogram),
            accepted_by_drafter=_named(self._accepted, names),
            shared_by_drafter=_named(self._shared, names),
            verified_by_drafter=_named(self._verified, names),
            idle_because=self.idle_because,
            decode_time_s=0.0 if self.first_at is None else self.last_at - self.first_at,
        )


def _places(bits: int) -> list[int]:
    return [place for place in range(bits.bit_length()) if bits >> place & 1]


def _named(counts: Counter[int], names: Sequence[str]) -> dict[str, int]:
    return {names[place]: count for place, count in counts.items() if count and place < len(names)}


class Attribution:
    """Counts verified trees, and credits their nodes to the drafters that proposed them.

    A node of several drafters counts for one of them (`cluster.spec.credit`), so that the counts of
    all drafters add up to the totals.  The position of an accepted node in the metrics is its
    depth, from 0.
    """

    def __init__(self) -> None:
        self._num_trees: Counter[str] = Counter()  # by task
        # By segment, where there are any.
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        # How many trees were like this: (drafter, task, nodes that count for it, depths accepted of
        # those, accepted nodes of its that count for another).
        self._counts: Counter[tuple[str, str, int, tuple[int, ...], int]] = Counter()

    def add(self, task: str, names: Sequence[str], verdict: TextVerdict, segment: str = "") -> None:
        """One verified tree of a text whose drafters have these names."""
        bits = verdict.sources.tolist()
        self._num_trees[task] += 1
        if segment:
            self._drafted[segment] += verdict.num_nodes
            self._accepted[segment] += len(bits)
        columns = zip(names, verdict.verified, verdict.credited, strict=False)
        for place, (name, num_proposed, num_own) in enumerate(columns):
            if num_proposed:
                accepted = tuple(
                    depth for depth, owner in enumerate(verdict.owners) if owner == place
                )
                num_shared = sum(each >> place & 1 for each in bits) - len(accepted)
                self._counts[name, task, num_own, accepted, num_shared] += 1

    def record(self, recorder: Recorder) -> None:
        for task, num_trees in self._num_trees.items():
            recorder.add(metrics.SPEC_STEPS, num_trees, task=task)
        for segment, num_drafted in self._drafted.items():
            recorder.add(metrics.SEGMENT_DRAFT_TOKENS, num_drafted, segment=segment)
            recorder.add(metrics.SEGMENT_ACCEPTED_TOKENS, self._accepted[segment], segment=segment)
        for (drafter, task, num_own, accepted, num_shared), count in self._counts.items():
            labels = {"drafter": drafter, "task": task}
            recorder.add(metrics.NUM_DRAFTS, count, **labels)
            recorder.add(metrics.NUM_DRAFT_TOKENS, count * num_own, **labels)
            if accepted:
                recorder.add(metrics.NUM_ACCEPTED_TOKENS, count * len(accepted), **labels)
            if num_shared:
                recorder.add(metrics.NUM_SHARED_TOKENS, count * num_shared, **labels)
            for depth in accepted:
                recorder.add(
                    metrics.NUM_ACCEPTED_PER_POS, count, drafter=drafter, position=str(depth)
                )
