"""The drafters inside the target worker: by turns with its steps, in its own thread.

After a step's verdicts have left, the residents hear what was committed and grow trees for the
texts that want some, the quickest of them first, until all trees are complete or their time is
over.  Their trees stay in the worker.
"""

from __future__ import annotations

import logging
import math
import operator
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce

from cluster import metrics
from cluster.core import Commit, Proposal, SamplingParams, TokenTree, token_array
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker, has_stalled
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.errors import ProtocolError
from cluster.messages import Refusal
from cluster.models.made_for import made_for_of
from cluster.plan.samples import Samples
from cluster.spec.step_cost import MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.worker.drafting import Drafting

log = logging.getLogger(__name__)

# A drafter that is asked for nothing hears of a text once it lacks so many tokens: look-ups learn
# from all texts, and a commit of many tokens costs little more than one of a few.
_MAX_LAG = 64
# Weight of the newest round in the running mean of what a drafter takes.
_TIME_WEIGHT = 0.1
# What drafting after a step may take, as a share of the step's own time.  A round of twice a plain
# one's time still pays where drafts double the tokens of a step, and hardly ever beyond that.  It
# bounds what a text that is being read costs those that are being written: a prompt of many chunks
# is read over as many rounds.
_STEP_SHARE = 1.0
# The residents of a model whose steps are shorter than this take about as long for themselves.
_LEAST_BOUND_S = 0.005


@dataclass(slots=True, eq=False)
class ResidentText:
    """The committed text of one request.

    residents: names of the drafters that draft for it.  draft_nodes: wanted after the last verdict,
    of look-ups alone where only_look_ups.  is_over: no draft can be of use any more.
    """

    request_id: str
    generation: int
    prompt_len: int
    params: SamplingParams
    task: str
    tenant: bytes
    residents: frozenset[str]
    tokens: TokenLog = field(default_factory=TokenLog)
    draft_nodes: int = 0
    only_look_ups: bool = False
    is_over: bool = False


class ResidentDrafter:
    """Belongs to the engine thread.

    mean_s: running mean of what a round of it takes.  made_for: the target that it was made for.
    is_look_up: it runs no model, and is asked where models would take too long.  num_read: texts
    that a model of its own had to read before it drafted, the last time.
    """

    def __init__(
        self,
        name: str,
        drafter: Drafter,
        vocab_size: int,
        breaker: CircuitBreaker,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """vocab_size: the target's."""
        self.name = name
        self.mean_s = 0.0
        self.made_for = made_for_of(drafter)
        self.engine: object = getattr(drafter, "engine", None)
        self.is_look_up = bool(getattr(drafter, "is_look_up", False))
        self.num_read = 0
        self.faults = breaker.faults  # by reason
        self._drafting = Drafting(drafter, name, breaker, clock, vocab_size)
        self.wants = self._drafting.wants  # of the target's steps
        self._breaker = breaker
        self._clock = clock
        # A model of its own reads a text when it is asked, which may be never.
        self._follows = self.is_look_up or self.wants != WANTS_NOTHING
        self._declined: dict[str, float] = {}  # request -> until when it is not told of it
        self._num_asked: Counter[str] = Counter()  # nodes, by task

    def draft(
        self, texts: Sequence[ResidentText], bound_s: float, deadline: float
    ) -> tuple[list[Proposal], float]:
        """Tell it of `texts` and let it grow the trees that they want, until the deadline.

        bound_s: what all residents have together.  Returns the trees that have nodes, and how long
        it took where it has stalled, else 0.
        """
        started = self._clock()
        self.num_read = 0
        due = self._due(texts, started) if self._breaker.allows(started) else []
        if not due:
            return [], 0.0
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
        trees = [each for each in newest.values() if len(each.tree.token_ids)]
        return trees, self._stalled_s(took_s, longest_s, bound_s)

    def read(self, rows: Sequence[StepRows], union: StepWants, bound_s: float) -> float:
        """Hand it what a step computed, unless it wants nothing or is left alone.

        union: what all residents want.  bound_s: what they have together after the step.  Returns
        how long it took where it has stalled, else 0."""
        started = self._clock()
        if self.wants == WANTS_NOTHING or not self._breaker.allows(started):
            return 0.0
        self._drafting.read([each.seen_by(self.wants, union) for each in rows])
        took_s = self._clock() - started
        return self._stalled_s(took_s, took_s, bound_s)

    def release(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._declined.pop(request_id, None)
        known = [request_id for request_id in request_ids if request_id in self._drafting.held]
        if known:
            self._drafting.release(known)

    def record(self, samples: Samples, worker_id: str) -> None:
        """Say what it holds, and what it was asked and did since this was last said."""
        self._drafting.record(samples, worker_id)
        for task, num_nodes in self._num_asked.items():
            samples.add(metrics.DRAFT_DEMAND, num_nodes, drafter=self.name, task=task)
        self._num_asked.clear()

    def state(self) -> str:
        """The state of its breaker; "resting" after calls that took too long."""
        return self._breaker.state(self._clock())

    def warm_up(self) -> None:
        """Draft once for nobody: a model's first steps take longer than all that follow."""
        tokens, params = TokenLog(token_array([0] * 8)), SamplingParams(temperature=0.0)
        text = ResidentText("", 0, len(tokens), params, "", b"", frozenset((self.name,)), tokens, 4)
        self.draft([text], math.inf, self._clock() + 1.0)
        self.release([text.request_id])
        self.mean_s = 0.0

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget faults and what it took: what it does for requests counts, and is told.

        is_warm: it has drafted before, so that its stalls are no first turn's."""
        self._drafting.begin_afresh(keeps_stalls=is_warm)
        self._declined.clear()
        self._num_asked.clear()

    def _due(self, texts: Iterable[ResidentText], now: float) -> list[ResidentText]:
        """The texts that it is told of now."""
        due = []
        for text in texts:
            if self.name not in text.residents or now < self._declined.get(text.request_id, now):
                continue
            num_nodes, num_lacking = self._num_wanted(text), len(text.tokens) - self._held_len(text)
            if num_nodes or (self._follows and num_lacking >= _MAX_LAG):
                due.append(text)
                self._num_asked[text.task] += num_nodes
                self.num_read += num_lacking > MAX_COMMIT and not self.is_look_up
        return due

    def _num_wanted(self, text: ResidentText) -> int:
        """Nodes of `text` that are wanted of this drafter."""
        return 0 if text.only_look_ups and not self.is_look_up else text.draft_nodes

    def _held_len(self, text: ResidentText) -> int:
        known = self._drafting.held.get(text.request_id)
        return 0 if known is None else known.have_len

    def _tell(self, texts: Sequence[ResidentText]) -> list[ResidentText]:
        """Tell it what it lacks; returns the texts of which it then lacks something still."""
        short = []
        answers = self._drafting.tell([self._commit(text) for text in texts]) if texts else ()
        for text, answer in zip(texts, answers, strict=True):
            if isinstance(answer, Refusal):
                self._decline(answer)
            elif answer.have_len != len(text.tokens) or answer.generation != text.generation:
                short.append(text)
        return short

    def _commit(self, text: ResidentText) -> Commit:
        tokens, known = text.tokens, self._drafting.held.get(text.request_id)
        base_len = min(self._held_len(text), len(tokens))  # the text may have been cut since
        opens = base_len == 0 or known is None or known.generation != text.generation
        return Commit(
            text.request_id, text.generation, base_len, tokens.hash_at(base_len),
            tokens.since(base_len), text.prompt_len,
            0 if text.is_over else self._num_wanted(text), text.task,
            text.params if opens else None, text.tenant if opens else b"",
        )  # fmt: skip

    def _grow(self, logs: Mapping[str, TokenLog], newest: dict[str, Proposal]) -> None:
        """One slice; `newest` are then the trees that there are."""
        tasks = self._drafting.growing.copy()
        proposals, refusals = self._drafting.grow(logs)
        for refusal in refusals:
            newest.pop(refusal.request_id, None)
            self._decline(refusal)
        for proposal in proposals:
            name = proposal.request_id
            newest[name] = _cut(proposal, tasks[name].max_nodes)

    def _decline(self, refusal: Refusal) -> None:
        """Keep the request from it for a while."""
        kept_s = self._breaker.rule(refusal.code).kept_s
        self._declined[refusal.request_id] = self._clock() + kept_s

    def _stalled_s(self, took_s: float, longest_s: float, bound_s: float) -> float:
        """Return how long it took where its longest call has stalled, else 0; then it rests."""
        if not has_stalled(longest_s, bound_s):
            return 0.0
        self._drafting.note_stall(took_s)
        return took_s


def _cut(proposal: Proposal, max_nodes: int) -> Proposal:
    """No more nodes than were asked for: what it takes to choose among them grows with them."""
    tree = proposal.tree
    if len(tree.token_ids) <= max_nodes:
        return proposal
    # Parents stand before their children.
    tree = TokenTree(tree.token_ids[:max_nodes], tree.parents[:max_nodes])
    return replace(proposal, tree=tree, survival=proposal.survival[:max_nodes])


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """The drafts of all residents after one step.

    trees: each with its drafter.  time_s: of all of them but those that have stalled.  num_read:
    texts that models read first; then the time is not that of drafting alone.  stalled: one of them
    took far too long.
    """

    trees: Sequence[tuple[ResidentDrafter, Proposal]] = ()
    time_s: float = 0.0
    num_read: int = 0
    stalled: bool = False


NOTHING_DRAFTED = Drafted()


class Residents:
    """All of them.  Belongs to the engine thread; request ids are those inside the worker.

    kinds: look-ups and models, as `Ask.with_models` tells them apart; empty = there are none.
    wants: what all of them together want of the target's steps.
    """

    def __init__(
        self, drafters: Sequence[ResidentDrafter], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.names = tuple(drafter.name for drafter in drafters)
        self.look_ups = tuple(drafter.name for drafter in drafters if drafter.is_look_up)
        self.kinds = tuple(sorted({not drafter.is_look_up for drafter in drafters}))
        self.made_for = {drafter.name: drafter.made_for for drafter in drafters}
        self.engines = {each.name: each.engine for each in drafters if each.engine is not None}
        self.wants = reduce(operator.or_, (each.wants for each in drafters), WANTS_NOTHING)
        self._drafters = list(drafters)
        self._clock = clock

    def draft(
        self, texts: Sequence[ResidentText], step_time_s: float, rows: Sequence[StepRows] = ()
    ) -> Drafted:
        """Tell them of texts that a step has answered, and let them grow what these want.

        rows: what the step computed, for the drafters that read it."""
        if not self._drafters:
            return NOTHING_DRAFTED
        started, bound_s = self._clock(), max(_STEP_SHARE * step_time_s, _LEAST_BOUND_S)
        stalled_s, num_read = 0.0, 0
        if rows:
            stalled_s += sum(each.read(rows, self.wants, bound_s) for each in self._drafters)
        trees: list[tuple[ResidentDrafter, Proposal]] = []
        # Each gets one turn at least; the quick ones are not kept waiting by the others.
        for drafter in sorted(self._drafters, key=lambda each: each.mean_s) if texts else ():
            try:
                proposals, lost_s = drafter.draft(texts, bound_s, started + bound_s)
            except Exception:  # a defect of ours: the drafter itself is contained
                log.exception("resident drafting failed name=%s", drafter.name)
                continue
            trees += [(drafter, proposal) for proposal in proposals]
            stalled_s += lost_s
            num_read = max(num_read, drafter.num_read)
        # Who stalls rests, so that this is no part of what drafting takes.
        drafted_s = max(self._clock() - started - stalled_s, 0.0)
        return Drafted(trees, drafted_s, num_read, stalled_s > 0.0)

    def record(self, samples: Samples, worker_id: str) -> None:
        """Say what they hold, and what they did since this was last said."""
        for drafter in self._drafters:
            drafter.record(samples, worker_id)

    def states(self) -> dict[str, str]:
        """Of each the state of its breaker, or that it rests."""
        return {drafter.name: drafter.state() for drafter in self._drafters}

    def faults(self) -> dict[str, dict[str, int]]:
        """Return the number of faults by the drafter's name and by reason."""
        return {each.name: dict(each.faults) for each in self._drafters if each.faults}

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget how they fared so far: nobody was served.  is_warm: except for their stalls."""
        for drafter in self._drafters:
            drafter.begin_afresh(is_warm=is_warm)

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; unknown ones are no error."""
        for drafter in self._drafters:
            drafter.release(request_ids)
