"""The pool's drafters: how much they are asked for, and what their trees bring."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from cluster import metrics
from cluster.coordinator.events import Asked
from cluster.metrics.recorder import Recorder
from cluster.spec.acceptance import AcceptanceModel, Group


class Demand:
    """Counts what drafters are asked for."""

    def __init__(self, recorder: Recorder, acceptance: AcceptanceModel) -> None:
        self._recorder = recorder
        self._acceptance = acceptance
        self._num_commits: Counter[tuple[str, Group]] = Counter()  # by drafter and group
        self._since = 0.0

    def hear(self, asked: Sequence[Asked]) -> None:
        add = self._recorder.add
        for each in asked:
            labels = {"drafter": each.drafter, "task": each.task}
            self._num_commits[each.drafter, each.group] += 1
            add(metrics.DRAFTER_COMMITS, 1, **labels)
            add(metrics.DRAFT_DEMAND, each.num_nodes, **labels)
            if each.num_nodes and each.is_hit is not None:
                add(metrics.PRE_DRAFTED, 1, outcome="hit" if each.is_hit else "miss", **labels)

    def worth(self, now: float) -> defaultdict[str, float]:
        """Return the tokens per second that the trees of each drafter were good for, since the
        last call.

        They are those of its best few nodes, verified or not: a drafter that has too much to do to
        be in time is worth as much as one that has not.
        """
        elapsed_s, self._since = now - self._since, now
        per_s: defaultdict[str, float] = defaultdict(float)
        for (drafter, group), count in self._num_commits.items():
            tokens = count * self._acceptance.known(drafter, group).accepted_of_few()
            per_s[drafter] += tokens / elapsed_s if elapsed_s > 0.0 else 0.0
        self._num_commits.clear()
        return per_s
