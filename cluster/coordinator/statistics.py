"""The effect of speculation per drafter: what targets verify, behind stop strings too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster import metrics
from cluster.messages import TextVerdict
from cluster.metrics.recorder import Recorder


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
