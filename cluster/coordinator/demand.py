"""The pool's drafters: how much they are asked for, and what their trees bring."""

from __future__ import annotations

from collections import Counter, defaultdict

from cluster import metrics
from cluster.coordinator.session import Session
from cluster.metrics.recorder import Recorder
from cluster.spec.acceptance import AcceptanceModel, Group


class Demand:
    """Counts on the path of tokens; everything else is done when somebody asks."""

    def __init__(self, recorder: Recorder, acceptance: AcceptanceModel) -> None:
        self._recorder = recorder
        self._acceptance = acceptance
        self._num_commits: Counter[tuple[str, str, Group]] = Counter()  # by drafter and task
        self._num_asked: Counter[tuple[str, str]] = Counter()  # nodes, likewise
        self._num_looked: Counter[tuple[str, str, str]] = Counter()  # drafter, task, outcome
        self._worth: defaultdict[str, float] = defaultdict(float)  # tokens, by drafter
        self._since = 0.0

    def note(self, session: Session, name: str, num_nodes: int) -> None:
        """Note that a drafter is told of a commit and asked for so many nodes."""
        task = session.request.task
        if num_nodes and session.has_answered:
            outcome = "hit" if session.has_tree_left(name) else "miss"
            self._num_looked[name, task, outcome] += 1
        self._num_commits[name, task, session.group] += 1
        self._num_asked[name, task] += num_nodes

    def record(self) -> None:
        """Export what drafters were asked for since the last call."""
        for (drafter, task, group), count in self._num_commits.items():
            self._recorder.add(metrics.DRAFTER_COMMITS, count, drafter=drafter, task=task)
            score = self._acceptance.known(drafter, group)
            self._worth[drafter] += count * score.accepted_of_few()
        for (drafter, task), num_nodes in self._num_asked.items():
            self._recorder.add(metrics.DRAFT_DEMAND, num_nodes, drafter=drafter, task=task)
        for (drafter, task, outcome), count in self._num_looked.items():
            self._recorder.add(
                metrics.PRE_DRAFTED, count, drafter=drafter, task=task, outcome=outcome
            )
        self._num_commits.clear()
        self._num_asked.clear()
        self._num_looked.clear()

    def worth(self, now: float) -> defaultdict[str, float]:
        """Return the tokens per second that the trees of each drafter were good for, since the
        last call.

        They are those of its best few nodes, verified or not: a drafter that has too much to do to
        be in time is worth as much as one that has not.
        """
        self.record()
        elapsed_s, self._since = now - self._since, now
        per_s: defaultdict[str, float] = defaultdict(float)
        if elapsed_s > 0.0:
            per_s.update((name, tokens / elapsed_s) for name, tokens in self._worth.items())
        self._worth.clear()
        return per_s
