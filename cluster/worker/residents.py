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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce

from cluster import metrics
from cluster.core import Commit, Proposal
from cluster.draft.answers import cut
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker, has_stalled
from cluster.draft.drafting import Drafting
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.draft.told import told_params
from cluster.errors import ProtocolError
from cluster.messages import Refusal, StepReport
from cluster.metrics.recorder import Recorder
from cluster.models.made_for import made_for_of
from cluster.models.version import NO_MODEL, ModelVersion
from cluster.plan.resident import DraftTurn, Resident
from cluster.spec.step_cost import MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.worker.text_record import TextRecord

log = logging.getLogger(__name__)

# A drafter that is asked for nothing is told of a text once it lacks so many tokens: look-ups learn
# from all texts, and a commit of many tokens costs little more than one of a few.
_MAX_LAG = 64
# Weight of the newest round in the running mean of a drafter's time.
_TIME_WEIGHT = 0.1
# The time that drafting may take after a step, as a share of the step's own time.  A round that
# takes twice as long as a plain one pays if drafts double the tokens of a step; a longer one hardly
# ever pays.  The limit also bounds how long texts in decoding wait for models that read a prompt: a
# prompt of many chunks is read over as many rounds.
_STEP_SHARE = 1.0
# After a chunk of a prompt, for which texts have waited already, it is no more than after the last
# step without one, or than this.
_LONG_STEP_S = 0.05
# The residents get at least this time: even for a model with shorter steps they need about so long.
_LEAST_BOUND_S = 0.005


class ResidentDrafter:
    """A drafter inside the target.  Belongs to the engine thread.

    mean_s: running mean of its time per round.  made_for: the target that it was made for.  model:
    which one it is.  is_look_up: it runs no model, and is asked even if models would take too long.
    member: as the control loop sees it.  turn: its last one, None = it was asked for nothing.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        vocab_size: int,
        breaker: CircuitBreaker,
        clock: Callable[[], float] = time.perf_counter,
        *,
        is_believed: bool = False,
        model: ModelVersion = NO_MODEL,
    ) -> None:
        """vocab_size: the target's.  is_believed: its drafts are drawn from the laws it says."""
        self.name = name
        self.is_believed = is_believed
        self.mean_s = 0.0
        self.made_for = made_for_of(drafter)
        self.model = model
        self.engine: object = getattr(drafter, "engine", None)
        self.is_look_up = bool(getattr(drafter, "is_look_up", False))
        self.member = Resident(0, name, self.is_look_up)
        self.turn: DraftTurn | None = None
        self.faults = breaker.faults  # by reason
        self._drafting = Drafting(drafter, name, breaker, clock, vocab_size)
        self.held = self._drafting.held  # its newest answers, by request
        self.wants = self._drafting.wants  # of the target's steps
        self.num_top, self.begin = self._drafting.num_top, self._drafting.begin
        self._clock = clock
        # Its own model reads a text only when it is asked to draft for it, which may be never.
        self._follows = self.is_look_up or self.wants != WANTS_NOTHING
        self._declined: dict[str, float] = {}  # request -> end of its exclusion
        self._num_asked: Counter[str] = Counter()  # nodes, by task

    def draft(
        self, texts: Sequence[TextRecord], bound_s: float, deadline: float
    ) -> tuple[list[Proposal], float]:
        """Tell it of `texts` and let it grow the trees that they want, until the deadline.

        bound_s: the time of all residents together.  Returns the trees that have nodes, and its
        time if it has stalled, else 0.
        """
        started = self._clock()
        self.turn = None
        due = self._due(texts, started) if self._drafting.breaker.allows(started) else []
        if not due:
            return [], 0.0
        num_unread = sum(self._num_lacking(text) > MAX_COMMIT for text in due)
        newest: dict[str, Proposal] = {}
        self._drafting.growing.clear()
        for text in self._tell(self._tell(due)):
            error = ProtocolError(f"it was sent {len(text.tokens)} tokens and keeps fewer")
            self._decline(self._drafting.refuse(text.request_id, text.generation, error))
        longest_s = self._clock() - started
        logs = {text.request_id: text.tokens for text in due}
        while self._drafting.growing:
            began = self._clock()
            self._grow(logs, newest)
            now = self._clock()
            longest_s = max(longest_s, now - began)
            if now >= deadline:
                break
        took_s = self._clock() - started
        self.mean_s += _TIME_WEIGHT * (took_s - self.mean_s)
        if asked := [nodes for nodes in map(self._num_wanted, due) if nodes]:
            num_read = 0 if self.is_look_up else num_unread
            self.turn = DraftTurn(self.name, len(asked), max(asked), took_s, num_read)
        trees = [each for each in newest.values() if len(each.tree.token_ids)]
        return trees, self._stalled_s(took_s, longest_s, bound_s)

    def read(self, rows: Sequence[StepRows], union: StepWants, bound_s: float) -> float:
        """Hand it the rows of a step, unless it wants none or its breaker lets it rest.

        union: what all residents want.  bound_s: the time of all residents after the step.  Returns
        its time if it has stalled, else 0."""
        started = self._clock()
        if self.wants == WANTS_NOTHING or not self._drafting.breaker.allows(started):
            return 0.0
        self._drafting.read([each.seen_by(self.wants, union) for each in rows])
        took_s = self._clock() - started
        return self._stalled_s(took_s, took_s, bound_s)

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._declined.pop(request_id, None)
        if known := [each for each in request_ids if self._drafting.knows(each)]:
            self._drafting.release(known)

    def record(self, recorder: Recorder, worker_id: str) -> None:
        """Record the tokens it holds, and its asks and drafts since the last record."""
        self._drafting.record(recorder, worker_id)
        for task, num_nodes in self._num_asked.items():
            recorder.add(metrics.DRAFT_DEMAND, num_nodes, drafter=self.name, task=task)
        self._num_asked.clear()

    def state(self) -> str:
        """See `CircuitBreaker.state`."""
        return self._drafting.breaker.state(self._clock())

    def is_usable(self, now: float) -> bool:
        """True if it drafts, and neither is its breaker open nor does it rest."""
        return not self._drafting.only_reads and self._drafting.breaker.allows(now)

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget faults and times so far, so that only work for requests counts and is recorded.

        is_warm: it has drafted before, so its stalls are not those of a first turn and count."""
        self._drafting.begin_afresh(keeps_stalls=is_warm)
        self._declined.clear()
        self._num_asked.clear()

    def _due(self, texts: Iterable[TextRecord], now: float) -> list[TextRecord]:
        """Return the texts to tell it of now."""
        due = []
        for text in texts:
            if self.name not in text.residents or now < self._declined.get(text.request_id, now):
                continue
            num_nodes = self._num_wanted(text)
            if num_nodes or (self._follows and self._num_lacking(text) >= _MAX_LAG):
                due.append(text)
                self._num_asked[text.task] += num_nodes
        return due

    def _num_wanted(self, text: TextRecord) -> int:
        """Return the number of nodes that `text` wants of this drafter."""
        return text.draft_nodes if text.ask_mask & self.member.bit else 0

    def _num_lacking(self, text: TextRecord) -> int:
        return len(text.tokens) - self._held_len(text)

    def _held_len(self, text: TextRecord) -> int:
        known = self.held.get(text.request_id)
        return 0 if known is None else known.have_len

    def _tell(self, texts: Sequence[TextRecord]) -> list[TextRecord]:
        """Tell it the tokens it lacks; returns the texts of which it still lacks tokens then."""
        short = []
        answers = self._drafting.tell([self._commit(text) for text in texts]) if texts else ()
        for text, answer in zip(texts, answers, strict=True):
            if isinstance(answer, Refusal):
                self._decline(answer)
            elif answer.have_len != len(text.tokens) or answer.generation != text.generation:
                short.append(text)
        return short

    def _commit(self, text: TextRecord) -> Commit:
        tokens, known = text.tokens, self.held.get(text.request_id)
        base_len = min(self._held_len(text), len(tokens))  # the text may have been cut since
        opens = base_len == 0 or known is None or known.generation != text.generation
        return Commit(
            text.request_id, text.generation, base_len, tokens.hash_at(base_len),
            tokens.since(base_len), text.prompt_len,
            0 if text.is_over else self._num_wanted(text), text.task,
            told_params(text.params, is_believed=self.is_believed) if opens else None,
            text.tenant if opens else b"",
        )  # fmt: skip

    def _grow(self, logs: Mapping[str, TokenLog], newest: dict[str, Proposal]) -> None:
        """Grow the trees by one slice, and enter them into `newest`."""
        tasks = self._drafting.growing.copy()
        proposals, refusals = self._drafting.grow(logs)
        for refusal in refusals:
            newest.pop(refusal.request_id, None)
            self._decline(refusal)
        for proposal in proposals:
            newest[proposal.request_id] = cut(proposal, tasks[proposal.request_id].max_nodes)

    def _decline(self, refusal: Refusal) -> None:
        """Do not tell it of the request for a while."""
        kept_s = self._drafting.breaker.rule(refusal.code).kept_s
        self._declined[refusal.request_id] = self._clock() + kept_s

    def _stalled_s(self, took_s: float, longest_s: float, bound_s: float) -> float:
        """Return took_s and let it rest if its longest call has stalled; otherwise return 0."""
        if not has_stalled(longest_s, bound_s):
            return 0.0
        self._drafting.note_stall(took_s)
        return took_s


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """The drafts of all residents after one step.

    trees: each with its drafter.  time_s: the time of all residents but those that have stalled.
    turns: of those that were asked.  stalled: a resident took far too long.
    """

    trees: Sequence[tuple[ResidentDrafter, Proposal]] = ()
    time_s: float = 0.0
    turns: Sequence[DraftTurn] = ()
    stalled: bool = False


NOTHING_DRAFTED = Drafted()


class Residents:
    """All drafters inside the target.  Belongs to the engine thread; request ids are those inside
    the worker.

    wants: the rows of the target's steps that any of them reads.
    """

    def __init__(
        self, drafters: Sequence[ResidentDrafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.names = tuple(drafter.name for drafter in drafters)
        for number, drafter in enumerate(drafters):
            drafter.member = replace(drafter.member, number=number)
        self.made_for = {drafter.name: drafter.made_for for drafter in drafters}
        self.engines = {each.name: each.engine for each in drafters if each.engine is not None}
        self.wants = reduce(operator.or_, (each.wants for each in drafters), WANTS_NOTHING)
        self._drafters = list(drafters)
        self._clock = clock
        self._plain_s = 0.0  # time of the last step without rows of prompts

    def __iter__(self) -> Iterator[ResidentDrafter]:
        return iter(self._drafters)

    def exchange(self, drafter: ResidentDrafter) -> ResidentDrafter:
        """Draft with this one from now on; returns that of its name, which has freed its texts."""
        place = self.names.index(drafter.name)
        former, self._drafters[place] = self._drafters[place], drafter
        drafter.member = former.member
        former.release(tuple(former.held))  # for which it may have a thread of its own
        self.made_for[drafter.name] = drafter.made_for
        if drafter.engine is not None:
            self.engines[drafter.name] = drafter.engine
        return former

    def usable(self, now: float) -> tuple[Resident, ...]:
        """Return those that may be asked now."""
        return tuple(each.member for each in self._drafters if each.is_usable(now))

    def draft(
        self, texts: Sequence[TextRecord], step: StepReport, rows: Sequence[StepRows] = ()
    ) -> Drafted:
        """Tell them of texts that `step` has answered, and let them grow the trees these want.

        rows: the rows of the step, for the drafters that read them."""
        if not self._drafters:
            return NOTHING_DRAFTED
        if not step.num_prefill_tokens:
            self._plain_s = step.step_time_s
        step_s = min(step.step_time_s, max(self._plain_s, _LONG_STEP_S))
        started, bound_s = self._clock(), max(_STEP_SHARE * step_s, _LEAST_BOUND_S)
        stalled_s, turns = 0.0, list[DraftTurn]()
        if rows:
            stalled_s += sum(each.read(rows, self.wants, bound_s) for each in self._drafters)
        trees: list[tuple[ResidentDrafter, Proposal]] = []
        # Each gets at least one turn; the quick ones go first and do not wait for the others.
        for drafter in sorted(self._drafters, key=lambda each: each.mean_s) if texts else ():
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

    def record(self, recorder: Recorder, worker_id: str) -> None:
        """Record the tokens they hold, and their work since the last record."""
        for drafter in self._drafters:
            drafter.record(recorder, worker_id)

    def states(self) -> dict[str, str]:
        """Return the state of each drafter's breaker, or that it rests."""
        return {drafter.name: drafter.state() for drafter in self._drafters}

    def faults(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by the drafter's name and by reason."""
        return {each.name: dict(each.faults) for each in self._drafters if each.faults}

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget faults and times so far, which served no request.  is_warm: but keep stalls."""
        for drafter in self._drafters:
            drafter.begin_afresh(is_warm=is_warm)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ones are ignored."""
        for drafter in self._drafters:
            drafter.release(request_ids)
