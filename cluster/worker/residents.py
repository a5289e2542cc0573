"""The drafters inside the target worker: by turns with its steps, in its own thread.

After a step's verdicts have left, the residents hear what was committed and grow trees for the
texts that want some, the quickest of them first, until all trees are complete or their time is
over.  Their trees stay in the worker.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from cluster import metrics
from cluster.core import Proposal
from cluster.draft.inside import WANTS_NOTHING, StepRows
from cluster.plan.samples import Samples
from cluster.worker.resident import ResidentDrafter, ResidentText

log = logging.getLogger(__name__)

# What drafting after a step may take, as a share of the step's own time.  A round of twice a plain
# one's time still pays where drafts double the tokens of a step, and hardly ever beyond that.  It
# bounds what a text that is being read costs those that are being written: a prompt of many chunks
# is read over as many rounds.
_STEP_SHARE = 1.0
# The residents of a model whose steps are shorter than this take about as long for themselves.
_LEAST_BOUND_S = 0.005


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What residents made of a step.

    trees: each with its drafter.  time_s: of all of them but those that have stalled.  num_read:
    texts that models read first; then the time is not that of drafting alone.  stalled: names of
    those that took far too long.
    """

    trees: Sequence[tuple[ResidentDrafter, Proposal]] = ()
    time_s: float = 0.0
    num_read: int = 0
    stalled: Sequence[str] = ()


NOTHING_DRAFTED = Drafted()


class Residents:
    """All of them.  Belongs to the engine thread; request ids are those inside the worker.

    kinds: look-ups and models, as `Ask.with_models` tells them apart; empty = there are none.
    """

    def __init__(
        self, drafters: Sequence[ResidentDrafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.names = tuple(drafter.name for drafter in drafters)
        self.look_ups = tuple(drafter.name for drafter in drafters if drafter.is_look_up)
        self.kinds = tuple(sorted({not drafter.is_look_up for drafter in drafters}))
        self.made_for = {drafter.name: drafter.made_for for drafter in drafters}
        self.engines = {each.name: each.engine for each in drafters if each.engine is not None}
        self._drafters = list(drafters)
        self._clock = clock
        self._num_asked: Counter[tuple[str, str]] = Counter()  # nodes, by drafter and task
        # What all of them together want of the target's steps.
        self.wants = reduce(operator.or_, (each.wants for each in drafters), WANTS_NOTHING)

    def draft(
        self, texts: Sequence[ResidentText], step_time_s: float, rows: Sequence[StepRows] = ()
    ) -> Drafted:
        """Tell them of texts that a step has answered, and let them grow what these want.

        rows: what the step computed, for the drafters that read it."""
        if not self._drafters:
            return NOTHING_DRAFTED
        started, bound_s = self._clock(), max(_STEP_SHARE * step_time_s, _LEAST_BOUND_S)
        stalls: dict[str, float] = dict.fromkeys(self.names, 0.0)  # seconds, by the drafter
        if rows:
            for drafter in self._drafters:
                stalls[drafter.name] += drafter.read(rows, self.wants, bound_s)
        trees: list[tuple[ResidentDrafter, Proposal]] = []
        # Each gets one turn at least; the quick ones are not kept waiting by the others.
        for drafter in sorted(self._drafters, key=lambda each: each.mean_s) if texts else ():
            try:
                proposals, stalled_s = drafter.draft(texts, bound_s, started + bound_s)
            except Exception:  # a defect of ours: the drafter itself is contained
                log.exception("resident drafting failed name=%s", drafter.name)
                continue
            trees += [(drafter, proposal) for proposal in proposals]
            stalls[drafter.name] += stalled_s
        for text in texts:
            if text.draft_nodes:
                for name in text.residents:
                    self._num_asked[name, text.task] += text.draft_nodes
        num_read = max(each.num_read for each in self._drafters) if texts else 0
        # Who stalls rests, so that this is no part of what drafting takes.
        drafted_s = max(self._clock() - started - sum(stalls.values()), 0.0)
        stalled = [name for name, stalled_s in stalls.items() if stalled_s]
        return Drafted(trees, drafted_s, num_read, stalled)

    def record(self, samples: Samples, worker_id: str) -> None:
        """Say what they hold, and what they did since this was last said."""
        for drafter in self._drafters:
            drafter.record(samples, worker_id)
        for (name, task), num_nodes in self._num_asked.items():
            samples.add(metrics.DRAFT_DEMAND, num_nodes, drafter=name, task=task)
        self._num_asked.clear()

    def states(self) -> dict[str, str]:
        """Of each the state of its breaker, or that it rests."""
        return {drafter.name: drafter.state() for drafter in self._drafters}

    def faults(self) -> dict[str, dict[str, int]]:
        """How many there were, by the drafter's name and by reason."""
        return {each.name: dict(each.faults) for each in self._drafters if each.faults}

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget how they fared so far: nobody was served.  is_warm: except for their stalls."""
        self._num_asked.clear()
        for drafter in self._drafters:
            drafter.begin_afresh(is_warm=is_warm)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ones are no error."""
        for drafter in self._drafters:
            drafter.release(request_ids)
