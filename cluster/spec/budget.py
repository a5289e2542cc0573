"""How many draft nodes a step verifies, which, and whether to wait for more: the best goodput.

    goodput(n, w) = W * exp(cum[n] / W) / (w + T_v(B, n))

W: sum of the sequences' weights; cum[n]: the n greatest weighted gains of the batch, of the trees
at hand (w = 0) or of those expected after waiting w.  A node of survival s gains log(1 + s / t)
where its sequence is expected to emit t tokens without it: what is as great as can be is then the
weighted geometric mean of the sequences' speeds (proportional fairness; Kelly, Maulloo and Tan
1998).  Of one sequence that is its speed; of many the sum of their tokens would let those whose
drafts hold make the others, which step with them, slower than plain decoding.
n = 0, plain decoding, is always a candidate.  One rule covers adaptive draft length, per-task
fallback and switching speculation off under load; the guards bound what it may cost while the rule
is misled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cluster.spec.drafts import (
    BatchDrafts,
    BudgetRules,
    Choice,
    Decision,
    Gains,
    SequenceDraft,
    Share,
    pack,
)
from cluster.spec.forest import Indices
from cluster.spec.goodput import GoodputModel
from cluster.spec.step_times import bucket
from cluster.spec.waits import Standing, WaitTrials, price_wait

# While a batch size is unmeasured: plain steps at first, and later every sixteenth.
_PLAIN_INTERVAL = 16
# A doubtful count is worth measuring if it would be the best at so many times its goodput.
_HOPE = 1.5
# A wait that is tried takes at most this share of a plain step.
_TRIAL_SHARE = 0.5


@dataclass(slots=True)
class _Mode:
    """What the controller remembers per bucket of sequences.

    num_unmeasured: choices made while plain steps of so many sequences were not measured.
    num_declined: choices in a row that left all drafts aside because none was worth it.
    """

    speculating: bool = False
    num_chosen: int = 0
    num_unmeasured: int = 0
    num_declined: int = 0


class BudgetController:
    """Chooses draft nodes for each step and learns what steps cost.

    waits_s: the waits, ascending, that `SequenceDraft.arriving` speaks of.
    sibling: of the same target, for requests of another law: they share what steps take.
    There is no clock and no randomness in it: equal calls give equal answers.
    """

    def __init__(
        self,
        rules: BudgetRules,
        waits_s: Sequence[float] = (),
        sibling: BudgetController | None = None,
    ) -> None:
        self._rules = rules
        self._waits_s = tuple(waits_s)
        self._model: GoodputModel = GoodputModel(rules, sibling._model if sibling else None)
        self._times = self._model.times
        self._modes: dict[int, _Mode] = {}
        self._trials = WaitTrials()
        self._num_refusals = 0

    @property
    def deficit_s(self) -> float:
        """What speculation has lost on this target and not regained, in seconds."""
        return self._model.deficit_s

    def take_refusals(self) -> int:
        """Choices since the last call in which the guard refused the best number of nodes."""
        num_refusals, self._num_refusals = self._num_refusals, 0
        return num_refusals

    def record(
        self,
        num_sequences: int,
        num_nodes: int,
        step_time_s: float,
        *,
        is_quiet: bool | None = False,
    ) -> None:
        """What a step took, in seconds; leave out steps that held prefill rows.

        is_quiet: no drafter was at work; None = perhaps, which says nothing of plain steps.
        """
        if num_sequences > 0 and step_time_s > 0.0:
            if num_nodes == 0 and is_quiet:
                self._model.quiet.record(num_sequences, step_time_s)
            elif num_nodes or is_quiet is not None:
                self._times.record(num_sequences, num_nodes, step_time_s)

    def quiet_factor(self, num_sequences: int) -> float:
        """Plain steps without drafters over those beside them; 1 while that is not known."""
        return self._model.quiet_factor(num_sequences)

    def num_declined(self, num_sequences: int) -> int:
        """Choices in a row, at this load, in which there were drafts and none was worth it."""
        mode = self._modes.get(bucket(num_sequences))
        return 0 if mode is None else mode.num_declined

    def is_exhausted(self, num_sequences: int) -> bool:
        """Whether speculation, drafters beside plain steps included, has lost at this load all that
        it may lose."""
        return self._model.guard(num_sequences).is_exhausted

    def take_gain(self, num_sequences: int) -> float | None:
        """See `GoodputModel.take_gain`."""
        return self._model.take_gain(num_sequences)

    def take_spell(self, num_sequences: int) -> float | None:
        """By what factor speculation has been faster than plain decoding at this load since this
        was last answered, all rounds with drafters at work together; None: too few to tell."""
        return self._model.take_spell(num_sequences)

    def forget_declined(self) -> None:
        """Count anew."""
        for mode in self._modes.values():
            mode.num_declined = 0

    def settle(
        self,
        shares: Sequence[Share],
        round_time_s: float | None,
        waited_s: float = 0.0,
        *,
        is_quiet: bool | None = False,
    ) -> None:
        """Enter a finished round into the accounts, before its step is recorded.

        For it was chosen by what was known then, and a plain step is credited as it was believed.

        round_time_s: without waited_s; None = not measured, its estimate must do.
        is_quiet: no drafter was at work.
        The round's extra time is charged to requests by their nodes, a wait to whom it was for.
        """
        self._model.settle(shares, round_time_s, waited_s, is_quiet=is_quiet)

    def estimate(self, num_sequences: int, num_nodes: int) -> float | None:
        """T_v(B, N) in seconds as it is believed at present; None while unmeasured."""
        return self._times.estimate(num_sequences, num_nodes)

    def high(self, num_sequences: int, num_nodes: int) -> float | None:
        """The high quantile of recent step times that the guards go by, in seconds."""
        return self._times.high(num_sequences, num_nodes)

    def choose(
        self, batch: Sequence[SequenceDraft], max_wait_s: float = 0.0, waited_s: float = 0.0
    ) -> Decision:
        """The nodes of the next step, or a wait of at most max_wait_s.

        waited_s: has been waited already, for this very step.
        """
        packed = pack(batch, self._rules.max_draft_tokens)
        choice = self.decide(packed, max_wait_s, waited_s)
        if choice.wait_s > 0.0:
            return Decision([], choice.wait_s, choice.awaited)
        counts = np.array([len(draft.survival) for draft in batch], dtype=np.int64)
        starts = np.cumsum(counts) - counts
        nodes = np.sort(choice.nodes)
        owners = np.searchsorted(starts + counts, nodes, side="right")
        return Decision(
            [(nodes[owners == i] - starts[i]).astype(np.int32) for i in range(len(batch))]
        )

    def decide(self, batch: BatchDrafts, max_wait_s: float = 0.0, waited_s: float = 0.0) -> Choice:
        """`choose`, for drafts that are ranked already: what a whole batch offers, as arrays."""
        if len(batch.nodes) == 0 and batch.arriving is None:
            return Choice(batch.nodes)  # the usual case without speculation
        batch = replace(batch, caps=self._model.caps(batch))
        nodes, gains = self._ranked(batch)
        num_nodes, goodput = self._num_nodes(batch, gains, waited_s)
        waits_s = [wait_s for wait_s in self._waits_s if wait_s <= max_wait_s]
        if goodput is not None and waits_s and batch.arriving is not None:
            now = Standing(num_nodes, goodput, waited_s)
            wait_s, awaited = price_wait(self._model, batch, now, waits_s, max_wait_s)
            if wait_s > 0.0:
                self._modes[bucket(len(batch))].num_declined = 0  # they are worth a wait
                is_trial = self._trials.paid(len(batch))
                longest_s = self._longest_trial_s(len(batch), max_wait_s) if is_trial else 0.0
                return Choice(nodes[:0], max(wait_s, longest_s), awaited, longest_s > wait_s)
        return Choice(nodes[:num_nodes])

    def trial_s(self, num_sequences: int, max_wait_s: float) -> float:
        """How long to wait for drafts just to find out how fast they come; mostly 0, not at all.

        To be asked when there are none and some are on their way.
        """
        wait_s = self._longest_trial_s(num_sequences, max_wait_s)
        return wait_s if wait_s > 0.0 and self._trials.is_due(num_sequences) else 0.0

    def _longest_trial_s(self, num_sequences: int, max_wait_s: float) -> float:
        step_s = self._model.plain_s(num_sequences)
        if step_s is None or not self._times.is_measured(num_sequences, 0):
            return 0.0
        wait_s = min(max_wait_s, _TRIAL_SHARE * step_s)
        return wait_s if self._model.allows(num_sequences, 0, wait_s) else 0.0

    def _ranked(self, batch: BatchDrafts) -> tuple[Indices, Gains]:
        """All admissible nodes, best first: (nodes, weighted gains).

        Sorting is stable and a parent is never worth less than its child and stands before it, so
        every prefix of the ranking is closed under parents.
        """
        is_admissible = (batch.ranks < batch.caps[batch.owners]) & (batch.survival > 0.0)
        gains = batch.gains(is_admissible)
        ranking = np.argsort(-gains, kind="stable")[: self._rules.max_step_nodes]
        return batch.nodes[is_admissible][ranking], gains[ranking]

    def _num_nodes(
        self, batch: BatchDrafts, gains: Gains, waited_s: float
    ) -> tuple[int, float | None]:
        """The number of nodes for this step, and its goodput; None: it is to be measured now."""
        num_sequences = len(batch)
        mode = self._modes.setdefault(bucket(num_sequences), _Mode())
        mode.num_chosen += 1
        if self._must_step_plainly(num_sequences, mode, has_drafts=len(gains) > 0):
            return 0, None
        weight = float(batch.weights.sum())
        goodputs = self._model.goodputs(num_sequences, weight, gains)
        if len(gains) == 0:
            return 0, goodputs[0]
        best = self._best_allowed(num_sequences, goodputs, waited_s)
        bar = goodputs[0] * (1.0 if mode.speculating else 1.0 + self._rules.hysteresis)
        mode.speculating = best > 0 and goodputs[best] > bar
        wanted = best if mode.speculating else 0
        probe = self._probe(num_sequences, mode.num_chosen, goodputs, waited_s)
        if probe is not None:
            return probe, None
        mode.num_declined = 0 if wanted else mode.num_declined + 1
        return wanted, goodputs[wanted]

    def _best_allowed(self, num_sequences: int, goodputs: dict[int, float], waited_s: float) -> int:
        """The best number of nodes that the target's account could lose."""
        ranked = sorted(goodputs, key=lambda n: (-goodputs[n], n))
        best = next(n for n in ranked if n == 0 or self._model.allows(num_sequences, n, waited_s))
        self._num_refusals += best != ranked[0]
        return best

    def _must_step_plainly(self, num_sequences: int, mode: _Mode, *, has_drafts: bool) -> bool:
        """Whether plain steps come first, so that they get measured.

        Steps beside prefills are never recorded: under a steady stream of prompts a batch size
        may stay unmeasured for long, and goes by its neighbour then, but for a plain step now and
        then.  After a change of load they come first again, for the accounts go by them.
        """
        if self._times.is_doubtful(num_sequences, 0):
            return True
        if self._times.is_measured(num_sequences, 0):
            return False
        mode.num_unmeasured += has_drafts
        return (
            mode.num_unmeasured <= _PLAIN_INTERVAL
            or mode.num_unmeasured % _PLAIN_INTERVAL == 0
            or self._times.estimate(num_sequences, 0) is None
        )

    def _probe(
        self, num_sequences: int, num_chosen: int, goodputs: dict[int, float], waited_s: float
    ) -> int | None:
        """A count to measure now, of what the choice hangs on: plain, the best, its neighbours.

        Doubtful ones are measured in every second step, so that a change of load is dealt with
        within some dozen steps; the stalest one every probe_interval.
        """
        times = self._times
        is_due = num_chosen % self._rules.probe_interval == 0
        if num_chosen % 2 and not is_due:
            return None
        counts = sorted(goodputs)
        best = max(counts[1:], key=lambda n: goodputs[n])
        place = counts.index(best)
        around = {0, *counts[max(place - 1, 0) : place + 2]}
        for count in counts:
            is_hopeful = count in around or goodputs[count] * _HOPE > goodputs[best]
            is_wanted = is_hopeful and times.is_doubtful(num_sequences, count)
            if is_wanted and self._model.allows(num_sequences, count, waited_s):
                return count
        if not is_due:
            return None
        stalest = max(sorted(around), key=lambda n: times.age(num_sequences, n))
        if times.age(num_sequences, stalest) < self._rules.probe_interval // 2:
            return None
        is_allowed = stalest == 0 or self._model.allows(num_sequences, stalest, waited_s)
        return stalest if is_allowed else None
