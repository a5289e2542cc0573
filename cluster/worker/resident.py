"""One drafter inside the target worker: told of texts, asked for trees, and left alone when it
fails."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster import metrics
from cluster.core import (
    Commit,
    DraftTask,
    Proposal,
    SamplingParams,
    TokenTree,
    token_array,
)
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.errors import CapacityError, ProtocolError, RequestError, error_from_code
from cluster.messages import Refusal
from cluster.models.made_for import MadeFor
from cluster.plan.samples import Samples
from cluster.spec.step_cost import MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.spec.tree_check import problem_in_text
from cluster.worker.contained_drafter import ContainedDrafter
from cluster.worker.stall_debt import StallDebt, has_stalled

# A drafter that is asked for nothing hears of a text once it lacks so many tokens: look-ups learn
# from all texts, and a commit of many tokens costs little more than one of a few.
_MAX_LAG = 64
# Weight of the newest round in the running mean of what a drafter takes.
_TIME_WEIGHT = 0.1


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
        reset_s: float,
        clock: Callable[[], float],
    ) -> None:
        """vocab_size: the target's.  reset_s: so long a request that it refused is kept from it."""
        self.name = name
        self.mean_s = 0.0
        self.made_for = MadeFor()
        self.engine: object = getattr(drafter, "engine", None)
        self.is_look_up = bool(getattr(drafter, "is_look_up", False))
        self.num_read = 0
        self.faults: Counter[str] = Counter()  # by reason
        self._told_faults: Counter[str] = Counter()
        self._drafter = ContainedDrafter(drafter, name, clock, vocab_size)
        self._breaker = breaker
        self._reset_s = reset_s
        self._clock = clock
        self._stalls = StallDebt(name, clock)
        self._told: dict[str, tuple[int, int]] = {}  # request -> generation, tokens it holds
        self._declined: dict[str, float] = {}  # request -> until when it is not told of it
        self._reported_s = 0.0

    def draft(
        self, texts: Sequence[ResidentText], bound_s: float, deadline: float
    ) -> tuple[list[Proposal], float]:
        """Tell it of `texts` and let it grow the trees that they want, until the deadline.

        bound_s: what all residents have together.  Returns the trees that have nodes, and how long
        it took where it has stalled, else 0.
        """
        mine = [text for text in texts if self.name in text.residents]
        started = self._clock()
        is_resting = self._is_resting(started)
        told = [] if is_resting else [text for text in mine if self._is_due(text, started)]
        self.num_read = 0
        if not self.is_look_up:
            self.num_read = sum(self._num_lacking(text) > MAX_COMMIT for text in told)
        if not told:
            return [], 0.0
        refusals: list[Refusal] = []
        newest: dict[str, Proposal] = {}
        wanted = self._observe(told, refusals)
        longest_s = self._clock() - started
        while wanted:
            began = self._clock()
            is_growing = self._grow(wanted, newest, refusals)
            now = self._clock()
            longest_s = max(longest_s, now - began)
            if not is_growing or now >= deadline:
                break
        took_s = self._clock() - started
        stalled_s = took_s if has_stalled(longest_s, bound_s) else 0.0
        self._judge(refusals, stalled_s, has_drafted=bool(newest))
        self.mean_s += _TIME_WEIGHT * (took_s - self.mean_s)
        return [each for each in newest.values() if len(each.tree)], stalled_s

    @property
    def wants(self) -> StepWants:
        """What it wants of the target's steps."""
        return self._drafter.wants

    def read(self, rows: Sequence[StepRows], union: StepWants, bound_s: float) -> float:
        """Hand it what a step computed, unless it wants nothing or is left alone.

        union: what all residents want.  bound_s: what they have together after the step.  Returns
        how long it took where it has stalled, else 0."""
        wants = self._drafter.wants
        started = self._clock()
        if wants == WANTS_NOTHING or self._is_resting(started):
            return 0.0
        if not self._drafter.read([each.seen_by(wants, union) for each in rows]):
            self._breaker.record_failure(self._clock())
        taken_s = self._clock() - started
        if not has_stalled(taken_s, bound_s):
            return 0.0
        self.faults["stalled"] += 1
        self._stalls.owe(taken_s)
        return taken_s

    def release(self, request_ids: Sequence[str]) -> None:
        known = [request_id for request_id in request_ids if self._told.pop(request_id, None)]
        for request_id in request_ids:
            self._declined.pop(request_id, None)
        if known:
            self._drafter.release(known)

    def record(self, samples: Samples, worker_id: str) -> None:
        """Say what it holds, and how long it has drafted since this was last said."""
        busy_s, self._reported_s = self._drafter.busy_s - self._reported_s, self._drafter.busy_s
        if busy_s > 0.0:
            samples.add(metrics.DRAFT_TIME, busy_s, drafter=self.name)
        samples.set(metrics.DRAFTER_REQUESTS, len(self._told), drafter=self.name, worker=worker_id)
        for why, count in (self.faults - self._told_faults).items():
            samples.add(metrics.DRAFTER_FAULTS, count, drafter=self.name, why=why)
        self._told_faults = self.faults.copy()
        in_use, total = self._drafter.pages
        if total:
            of_drafter = {"role": "drafter", "worker": f"{worker_id}/{self.name}"}
            samples.set(metrics.KV_PAGES_IN_USE, in_use, **of_drafter)
            samples.set(metrics.KV_PAGES_TOTAL, total, **of_drafter)

    def state(self) -> str:
        """The state of its breaker; "resting" after calls that took too long."""
        now = self._clock()
        return "resting" if self._stalls.is_due(now) else self._breaker.state(now)

    def warm_up(self, vocab_size: int) -> None:
        """Draft once for nobody: a model's first steps take longer than all that follow."""
        tokens = TokenLog(token_array(np.arange(8) % vocab_size))
        params = SamplingParams(temperature=0.0, max_tokens=8)
        text = ResidentText("", 0, len(tokens), params, "", b"", frozenset((self.name,)), tokens, 4)
        self.draft([text], math.inf, self._clock() + 1.0)
        self.release([text.request_id])
        self.mean_s = 0.0

    def begin_afresh(self, *, is_warm: bool) -> None:
        """Forget faults and what it took: what it does for requests counts, and is told.

        is_warm: it has drafted before, so that its stalls are no first turn's."""
        self._breaker.record_success()
        self.faults.clear()
        if not is_warm:
            self._stalls = StallDebt(self.name, self._clock)
        self._declined.clear()
        self._reported_s = self._drafter.busy_s

    def _is_due(self, text: ResidentText, now: float) -> bool:
        until = self._declined.get(text.request_id)
        if until is not None:
            if now < until:
                return False
            del self._declined[text.request_id]
        if self._num_wanted(text):
            return True
        # A model of its own reads a text when it is asked, which may be never again.
        is_following = self.is_look_up or self.wants != WANTS_NOTHING
        return is_following and self._num_lacking(text) >= _MAX_LAG

    def _num_lacking(self, text: ResidentText) -> int:
        """Tokens of `text` that it has not been told of."""
        return len(text.tokens) - self._told.get(text.request_id, (0, 0))[1]

    def _num_wanted(self, text: ResidentText) -> int:
        """Nodes of `text` that are wanted of this drafter."""
        return 0 if text.only_look_ups and not self.is_look_up else text.draft_nodes

    def _observe(
        self,
        texts: Sequence[ResidentText],
        refusals: list[Refusal],
    ) -> dict[str, tuple[ResidentText, DraftTask]]:
        """Tell it what it lacks; returns the texts that it holds and that want a tree."""
        wanted: dict[str, tuple[ResidentText, DraftTask]] = {}
        short = list(texts)
        for is_last in (False, True):
            texts, short = short, []
            answers = self._drafter.observe([self._commit(text) for text in texts])
            for text, answer in zip(texts, answers, strict=True):
                if isinstance(answer, Refusal):
                    self._refused(answer, refusals)
                    continue
                self._told[text.request_id] = (text.generation, answer.have_len)
                if (answer.generation, answer.have_len) == (text.generation, len(text.tokens)):
                    num_nodes = self._num_wanted(text)
                    if num_nodes and not text.is_over:
                        task = DraftTask(text.request_id, text.generation, num_nodes)
                        wanted[text.request_id] = (text, task)
                elif is_last:
                    problem = f"the drafter was sent {len(text.tokens)} tokens and keeps fewer"
                    self._reset(text, problem, refusals)
                else:
                    short.append(text)
            if not short:
                break
        return wanted

    def _commit(self, text: ResidentText) -> Commit:
        generation, have_len = self._told.get(text.request_id, (-1, 0))
        # The text may have been cut since.
        base_len = min(have_len, len(text.tokens))
        opens = base_len == 0 or generation != text.generation
        return Commit(
            text.request_id,
            text.generation,
            base_len,
            text.tokens.hash_at(base_len),
            text.tokens.since(base_len),
            text.prompt_len,
            self._num_wanted(text),
            text.task,
            text.params if opens else None,
            text.tenant if opens else b"",
        )

    def _grow(
        self,
        wanted: dict[str, tuple[ResidentText, DraftTask]],
        newest: dict[str, Proposal],
        refusals: list[Refusal],
    ) -> bool:
        """One slice; what is complete leaves `wanted`.  False when nothing else comes."""
        proposals, refused = self._drafter.propose([task for _, task in wanted.values()])
        for refusal in refused:
            wanted.pop(refusal.request_id, None)
            newest.pop(refusal.request_id, None)
            self._refused(refusal, refusals)
        for proposal in proposals:
            entry = wanted.get(proposal.request_id)
            if entry is None or proposal.generation != entry[0].generation:
                continue
            problem = problem_in_text(proposal, entry[0].tokens)
            if problem is not None:
                wanted.pop(proposal.request_id)
                newest.pop(proposal.request_id, None)
                self._reset(entry[0], problem, refusals)
                continue
            newest[proposal.request_id] = _cut(proposal, entry[1].max_nodes)
            if proposal.is_complete:
                wanted.pop(proposal.request_id)
        return bool(proposals)

    def _reset(self, text: ResidentText, problem: str, refusals: list[Refusal]) -> None:
        self._drafter.release([text.request_id])
        refusal = Refusal(text.request_id, text.generation, ProtocolError.code, problem)
        self._refused(refusal, refusals)

    def _refused(self, refusal: Refusal, refusals: list[Refusal]) -> None:
        """Keep the request from it for a while: its text would be sent again and again."""
        self._told.pop(refusal.request_id, None)
        error = error_from_code(refusal.code, refusal.message)
        # It may be this very request that it cannot serve (say, too long).
        lasts_s = math.inf if isinstance(error, RequestError) else self._reset_s
        self._declined[refusal.request_id] = self._clock() + lasts_s
        refusals.append(refusal)

    def _judge(self, refusals: Sequence[Refusal], stalled_s: float, *, has_drafted: bool) -> None:
        """Leave it alone for a while where it fails again and again, or takes too long."""
        now = self._clock()
        errors = [error_from_code(each.code, each.message) for each in refusals]
        faults = [each for each in errors if not isinstance(each, (RequestError, CapacityError))]
        if faults:
            for fault in faults:
                self.faults["rubbish" if isinstance(fault, ProtocolError) else "refused"] += 1
                self._breaker.record_failure(now)
        elif has_drafted:
            self._breaker.record_success()
        if stalled_s:
            self.faults["stalled"] += 1
            self._stalls.owe(stalled_s)

    def _is_resting(self, now: float) -> bool:
        return self._stalls.is_due(now) or not self._breaker.allows(now)


def _cut(proposal: Proposal, max_nodes: int) -> Proposal:
    """No more nodes than were asked for: what it takes to choose among them grows with them."""
    if len(proposal.tree) <= max_nodes:
        return proposal
    # Parents stand before their children.
    tree = TokenTree(proposal.tree.token_ids[:max_nodes], proposal.tree.parents[:max_nodes])
    return replace(proposal, tree=tree, survival=proposal.survival[:max_nodes])
