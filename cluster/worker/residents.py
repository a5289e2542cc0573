"""The drafters inside the target worker, which run by turns with its steps in the same thread.

After a step's verdicts are sent, the residents are told of the committed tokens and grow trees for
the texts that want some.  The quickest resident goes first, until all trees are complete or the
residents' time is over.  Their trees stay in the worker.
"""

from __future__ import annotations

import logging
import operator
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import reduce

from cluster import metrics
from cluster.core import Clock, Proposal, SamplingParams
from cluster.draft.answers import cut
from cluster.draft.base import Drafter, told_params
from cluster.draft.breaker import CircuitBreaker, has_stalled
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.draft.runner import Runner
from cluster.metrics.recorder import Recorder
from cluster.models.fingerprint import NO_MODEL, ModelVersion
from cluster.models.made_for import made_for_of
from cluster.plan.texts import MAX_LAG, Resident
from cluster.records import record
from cluster.rpc.messages import Refusal, StepReport
from cluster.spec import evidence
from cluster.spec.step_profile import MAX_COMMIT, DraftTime
from cluster.worker.texts import TargetText

log = logging.getLogger(__name__)

# After a chunk of a prompt, for which texts have waited already, the residents' time is no more
# than after the last step without one, or than this.
_LONG_STEP_S = 0.05
# The residents get at least this time: even for a model with shorter steps they need about so long.
_LEAST_BOUND_S = 0.005


class ResidentDrafter(Runner):
    """A drafter inside the target.  Belongs to the engine thread.

    mean_s: running mean of its time per round.  made_for: the target that it was made for.  model:
    which one it is.  is_believed: its drafts are drawn from the laws it says.  member: as the
    control loop sees it; a look-up is asked even if models would take too long.  turn: its last
    one, None = it was asked for nothing.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        vocab_size: int,
        breaker: CircuitBreaker,
        clock: Clock = time.perf_counter,
        *,
        is_believed: bool = False,
        model: ModelVersion = NO_MODEL,
    ) -> None:
        """vocab_size: the target's."""
        super().__init__(drafter, name, breaker, clock, vocab_size)
        self.is_believed = is_believed
        self.mean_s = 0.0
        self.made_for = made_for_of(drafter)
        self.model = model
        self.engine: object = getattr(drafter, "engine", None)
        self.member = Resident(name, bool(getattr(drafter, "is_look_up", False)))
        self.turn: DraftTime | None = None
        # Its own model reads a text only when it is asked to draft for it, which may be never.
        self._follows = self.member.is_look_up or self.wants != WANTS_NOTHING
        self._declined: dict[str, float] = {}  # request -> end of its exclusion
        self._num_asked: Counter[str] = Counter()  # nodes, by task
        self._unread = set[str]()  # requests that its model was still reading when its turn ended

    def draft(
        self, texts: Sequence[TargetText], bound_s: float, deadline: float
    ) -> tuple[list[Proposal], float]:
        """Tell it of `texts` and let it grow the trees that they want, until the deadline.

        bound_s: the time of all residents together.  Returns the trees that have nodes, and its
        time if it has stalled, else 0.
        """
        started = self._clock()
        self.turn = None
        due = self._due(texts, started) if self.breaker.allows(started) else []
        if not due:
            return [], 0.0
        num_unread = sum(
            self._num_lacking(text) > MAX_COMMIT or text.id in self._unread for text, _ in due
        )
        newest: dict[str, Proposal] = {}
        self.growing.clear()
        self._decline(self.follow([(text.as_request, num_nodes) for text, num_nodes in due]))
        longest_s = self._clock() - started
        logs = {text.id: text.tokens for text, _ in due}
        while self.growing:
            began = self._clock()
            proposals, refusals = self.grow(logs)
            self._decline(refusals)
            for refusal in refusals:
                newest.pop(refusal.request_id, None)
            for proposal in proposals:
                name = proposal.request_id
                if type(proposal.base_len) is not int:  # NumPy's of few bits wrap in sums
                    proposal = replace(proposal, base_len=int(proposal.base_len))
                newest[name] = cut(proposal, self.wanted[name].max_nodes)
            now = self._clock()
            longest_s = max(longest_s, now - began)
            if now >= deadline:
                break
        took_s = self._clock() - started
        self.mean_s += evidence.RECENT * (took_s - self.mean_s)
        if asked := [num_nodes for _, num_nodes in due if num_nodes]:
            is_look_up = self.member.is_look_up
            self.turn = DraftTime(
                len(asked),
                max(asked),
                self.name,
                is_look_up,
                took_s,
                0 if is_look_up else num_unread,
            )
        trees = [each for each in newest.values() if len(each.tree.token_ids)]
        self._unread = self.growing.keys() - {each.request_id for each in trees}
        return trees, self._stalled_s(took_s, longest_s, bound_s)

    def read_step(self, rows: Sequence[StepRows], union: StepWants, bound_s: float) -> float:
        """Hand it the rows of a step, unless it wants none or its breaker lets it rest.

        union: what all residents want.  bound_s: the time of all residents after the step.  Returns
        its time if it has stalled, else 0."""
        started = self._clock()
        if self.wants == WANTS_NOTHING or not self.breaker.allows(started):
            return 0.0
        self.read([each.seen_by(self.wants, union) for each in rows])
        took_s = self._clock() - started
        return self._stalled_s(took_s, took_s, bound_s)

    def forget(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; it is told only of those that it knows."""
        for request_id in request_ids:
            self._declined.pop(request_id, None)
        if known := [each for each in request_ids if self.knows(each)]:
            self.release(known)

    def record(self, recorder: Recorder, worker_id: str) -> None:
        """Record the tokens it holds, and its asks and drafts since the last record."""
        super().record(recorder, worker_id)
        for task, num_nodes in self._num_asked.items():
            recorder.add(metrics.DRAFT_DEMAND, num_nodes, drafter=self.name, task=task)
        self._num_asked.clear()

    def begin_afresh(self, *, keeps_stalls: bool) -> None:
        """Forget faults and times so far, so that only work for requests counts and is recorded.

        keeps_stalls: it has drafted before, so its stalls are not those of a first turn."""
        super().begin_afresh(keeps_stalls=keeps_stalls)
        self._declined.clear()
        self._num_asked.clear()

    def _due(self, texts: Iterable[TargetText], now: float) -> list[tuple[TargetText, int]]:
        """Return the texts to tell it of now, each with the nodes that are wanted."""
        due = []
        for text in texts:
            if not text.may_ask(self.name) or now < self._declined.get(text.id, now):
                continue
            num_nodes = text.num_wanted(self.name)
            if num_nodes or (self._follows and self._num_lacking(text) >= MAX_LAG):
                due.append((text, num_nodes))
                self._num_asked[text.opened.task] += num_nodes
        return due

    def _num_lacking(self, text: TargetText) -> int:
        known = self.held.get(text.id)
        return len(text.tokens) - (known.have_len if known else 0)

    def _told(self, params: SamplingParams) -> SamplingParams:
        return told_params(params, is_believed=self.is_believed)

    def _decline(self, refusals: Iterable[Refusal]) -> None:
        """Do not tell it of these requests for a while."""
        for refusal in refusals:
            kept_s = self.breaker.rule(refusal.code).kept_s
            self._declined[refusal.request_id] = self._clock() + kept_s

    def _stalled_s(self, took_s: float, longest_s: float, bound_s: float) -> float:
        """Return took_s and let it rest if its longest call has stalled; otherwise return 0."""
        if not has_stalled(longest_s, bound_s):
            return 0.0
        self.note_stall(took_s)
        return took_s


@record
class Drafted:
    """The drafts of all residents after one step.

    trees: each with its drafter.  time_s: the time of all residents but those that have stalled.
    turns: of those that were asked.  stalled: a resident took far too long.
    """

    trees: Sequence[tuple[ResidentDrafter, Proposal]] = ()
    time_s: float = 0.0
    turns: Sequence[DraftTime] = ()
    stalled: bool = False


NOTHING_DRAFTED = Drafted()


class Residents:
    """All drafters inside the target.  Belongs to the engine thread; request ids are those inside
    the worker.

    wants: the rows of the target's steps that any of them reads.
    """

    def __init__(
        self, drafters: Sequence[ResidentDrafter], clock: Clock = time.perf_counter
    ) -> None:
        self.names = tuple(drafter.name for drafter in drafters)
        self.wants = reduce(operator.or_, (each.wants for each in drafters), WANTS_NOTHING)
        self._drafters = list(drafters)
        self._clock = clock
        self._promptless_s = 0.0  # time of the last step without rows of prompts

    def __iter__(self) -> Iterator[ResidentDrafter]:
        return iter(self._drafters)

    def exchange(self, drafter: ResidentDrafter) -> ResidentDrafter:
        """Draft with this one from now on; returns that of its name, which has freed its texts."""
        place = self.names.index(drafter.name)
        former, self._drafters[place] = self._drafters[place], drafter
        former.forget(tuple(former.held))  # for which it may have a thread of its own
        return former

    def usable(self, now: float) -> tuple[Resident, ...]:
        """Return those that draft and may be asked now."""
        return tuple(
            each.member for each in self if not each.only_reads and each.breaker.allows(now)
        )

    def draft(
        self, texts: Sequence[TargetText], step: StepReport, rows: Sequence[StepRows] = ()
    ) -> Drafted:
        """Tell them of texts that `step` has answered, and let them grow the trees these want.

        rows: the rows of the step, for the drafters that read them."""
        if not self._drafters:
            return NOTHING_DRAFTED
        if not step.num_prefill_tokens:
            self._promptless_s = step.step_time_s
        # As long as the step: a round that takes twice as long as a plain one pays if drafts double
        # the tokens of a step; a longer one hardly ever pays.  So texts in decoding do not wait for
        # a model that reads a prompt of many chunks: it reads it over as many rounds.
        step_s = min(step.step_time_s, max(self._promptless_s, _LONG_STEP_S))
        started, bound_s = self._clock(), max(step_s, _LEAST_BOUND_S)
        stalled_s, turns = 0.0, list[DraftTime]()
        if rows:
            stalled_s += sum(each.read_step(rows, self.wants, bound_s) for each in self)
        trees: list[tuple[ResidentDrafter, Proposal]] = []
        # Each gets at least one turn; the quick ones go first and do not wait for the others.
        for drafter in sorted(self, key=lambda each: each.mean_s) if texts else ():
            try:
                proposals, lost_s = drafter.draft(texts, bound_s, started + bound_s)
            except Exception:  # a defect of ours: the drafter itself is contained
                log.exception("resident drafting failed name=%s", drafter.name)
                continue
            trees += [(drafter, proposal) for proposal in proposals]
            stalled_s += lost_s
            turns += [drafter.turn] if drafter.turn else []
        # A drafter that stalls rests afterwards, so its stall is not part of the drafting time.
        drafted_s = max(self._clock() - started - stalled_s, 0.0)
        return Drafted(trees, drafted_s, turns, stalled_s > 0.0)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        for drafter in self:
            drafter.forget(request_ids)
