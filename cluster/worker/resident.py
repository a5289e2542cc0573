"""One drafter inside the target worker: by turns with its steps, told and asked by its texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from cluster import metrics
from cluster.core import Commit, Proposal, SamplingParams, TokenTree, token_array
from cluster.draft.base import Drafter
from cluster.draft.breaker import CircuitBreaker, has_stalled
from cluster.draft.inside import WANTS_NOTHING, StepRows, StepWants
from cluster.errors import ProtocolError
from cluster.messages import Refusal
from cluster.models.made_for import MadeFor
from cluster.plan.samples import Samples
from cluster.spec.step_cost import MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.worker.drafting import Drafting

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
        clock: Callable[[], float],
    ) -> None:
        """vocab_size: the target's."""
        self.name = name
        self.mean_s = 0.0
        self.made_for = MadeFor()
        self.engine: object = getattr(drafter, "engine", None)
        self.is_look_up = bool(getattr(drafter, "is_look_up", False))
        self.num_read = 0
        self._drafting = Drafting(drafter, name, breaker, clock, vocab_size)
        self._breaker = breaker
        self._clock = clock
        # A model of its own reads a text when it is asked, which may be never.
        self._follows = self.is_look_up or self.wants != WANTS_NOTHING
        self._declined: dict[str, float] = {}  # request -> until when it is not told of it
        self._told_faults: Counter[str] = Counter()
        self._told_busy_s = 0.0

    @property
    def wants(self) -> StepWants:
        """What it wants of the target's steps."""
        return self._drafting.wants

    @property
    def faults(self) -> Counter[str]:
        """How many there were, by reason."""
        return self._breaker.faults

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
            problem = f"the drafter was sent {len(text.tokens)} tokens and keeps fewer"
            error = ProtocolError(problem)
            self._decline([self._drafting.refuse(text.request_id, text.generation, error)])
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
        """Say what it holds, and how long it has drafted since this was last said."""
        drafting = self._drafting
        busy_s, self._told_busy_s = drafting.busy_s - self._told_busy_s, drafting.busy_s
        if busy_s > 0.0:
            samples.add(metrics.DRAFT_TIME, busy_s, drafter=self.name)
        held = len(drafting.held)
        samples.set(metrics.DRAFTER_REQUESTS, held, drafter=self.name, worker=worker_id)
        for why, count in (self.faults - self._told_faults).items():
            samples.add(metrics.DRAFTER_FAULTS, count, drafter=self.name, why=why)
        self._told_faults = self.faults.copy()
        in_use, total = drafting.pages
        if total:
            of_drafter = {"role": "drafter", "worker": f"{worker_id}/{self.name}"}
            samples.set(metrics.KV_PAGES_IN_USE, in_use, **of_drafter)
            samples.set(metrics.KV_PAGES_TOTAL, total, **of_drafter)

    def state(self) -> str:
        """The state of its breaker; "resting" after calls that took too long."""
        return self._breaker.state(self._clock())

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
        self._breaker.reset(keeps_stalls=is_warm)
        self._declined.clear()
        self._told_busy_s = self._drafting.busy_s

    def _due(self, texts: Iterable[ResidentText], now: float) -> list[ResidentText]:
        """The texts that it is told of now."""
        held, due = self._drafting.held, []
        for text in texts:
            if self.name not in text.residents:
                continue
            name = text.request_id
            if name in self._declined:
                if now < self._declined[name]:
                    continue
                del self._declined[name]
            known = held.get(name)
            num_lacking = len(text.tokens) - (0 if known is None else known.have_len)
            if self._num_wanted(text) or (self._follows and num_lacking >= _MAX_LAG):
                due.append(text)
                self.num_read += num_lacking > MAX_COMMIT and not self.is_look_up
        return due

    def _num_wanted(self, text: ResidentText) -> int:
        """Nodes of `text` that are wanted of this drafter."""
        return 0 if text.only_look_ups and not self.is_look_up else text.draft_nodes

    def _tell(self, texts: Sequence[ResidentText]) -> list[ResidentText]:
        """Tell it what it lacks; returns the texts of which it then lacks something still."""
        if not texts:
            return []
        answers = self._drafting.tell([self._commit(text) for text in texts])
        refusals = [each for each in answers if isinstance(each, Refusal)]
        self._decline(refusals)
        return [
            text
            for text, answer in zip(texts, answers, strict=True)
            if not isinstance(answer, Refusal)
            and (answer.generation != text.generation or answer.have_len != len(text.tokens))
        ]

    def _commit(self, text: ResidentText) -> Commit:
        known, tokens = self._drafting.held.get(text.request_id), text.tokens
        # The text may have been cut since.
        base_len = 0 if known is None else min(known.have_len, len(tokens))
        opens = base_len == 0 or known is None or known.generation != text.generation
        return Commit(
            text.request_id,
            text.generation,
            base_len,
            tokens.hash_at(base_len),
            tokens.since(base_len),
            text.prompt_len,
            0 if text.is_over else self._num_wanted(text),
            text.task,
            text.params if opens else None,
            text.tenant if opens else b"",
        )

    def _grow(self, logs: Mapping[str, TokenLog], newest: dict[str, Proposal]) -> None:
        """One slice; `newest` are then the trees that there are."""
        tasks = self._drafting.growing.copy()
        proposals, refusals = self._drafting.grow(logs)
        self._decline(refusals)
        for refusal in refusals:
            newest.pop(refusal.request_id, None)
        for proposal in proposals:
            name = proposal.request_id
            newest[name] = _cut(proposal, tasks[name].max_nodes)

    def _decline(self, refusals: Iterable[Refusal]) -> None:
        """Keep these requests from it for a while."""
        for refusal in refusals:
            kept_s = self._breaker.rule(refusal.code).kept_s
            self._declined[refusal.request_id] = self._clock() + kept_s

    def _stalled_s(self, took_s: float, longest_s: float, bound_s: float) -> float:
        """How long it took where its longest call has stalled, else 0; then it rests."""
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
