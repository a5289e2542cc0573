"""Runs one drafter: tells it of texts, asks it for trees, and contains its faults.

Inside the target it runs by turns with the steps (`cluster.worker.residents`), in the pool in a
thread of its own (`cluster.worker.draft_worker`).  An exception or a malformed answer costs the
request in question its drafts, and nothing else.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, TypeVar

from cluster import metrics
from cluster.core import Clock, Commit, Observation, Proposal, SamplingParams
from cluster.draft import answers as checks
from cluster.draft.answers import MAX_COUNT, checked_observation, narrowed, reader_of, told_of
from cluster.draft.base import Drafter, DraftTask, Interruptible
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.committed_text import RequestState, commit_of
from cluster.draft.inside import WANTS_NOTHING, StepReader, StepRows
from cluster.errors import DrafthouseError, ProtocolError, WorkerError
from cluster.logs import OnceAMinute
from cluster.metrics.recorder import Recorder
from cluster.rpc.messages import Refusal
from cluster.spec.token_log import TokenLog
from cluster.spec.tree_check import ANY_VOCABULARY, problem_in_text, problems_of_proposals

log = logging.getLogger(__name__)

T = TypeVar("T")
Asked = TypeVar("Asked", Commit, DraftTask)
Answer = TypeVar("Answer", Observation, Proposal)

# Files of ours: an exception raised in one of them does not come from the drafter's own code.
_OURS = frozenset((__file__, checks.__file__))
_NO_TEXTS: Mapping[str, TokenLog] = {}


class Runner:
    """One drafter with its state.  Only the drafting thread uses it, except for `interrupt`.

    held: the drafter's newest answer for each request of which it holds tokens.  wanted: the trees
    that it was asked for; growing: those that may not be complete yet.  wants: the rows of the
    target's steps that it reads.  busy_s: seconds that it has computed.
    """

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        breaker: CircuitBreaker,
        clock: Clock,
        vocab_size: int = ANY_VOCABULARY,
    ) -> None:
        self.name = name
        self.breaker = breaker
        self.busy_s = 0.0
        self.held: dict[str, Observation] = {}
        self.wanted: dict[str, DraftTask] = {}
        self.growing: dict[str, DraftTask] = {}
        self._drafter = drafter
        self._clock = clock
        self._vocab_size = vocab_size
        self._said = OnceAMinute()
        self._has_failed = False  # since it was last told of something
        self._reported_s = 0.0  # of busy_s
        self._reported_faults: Counter[str] = Counter()
        self._interruptible = drafter if isinstance(drafter, Interruptible) else None
        self._reader: StepReader | None = None
        self.wants = WANTS_NOTHING
        self.only_reads = bool(getattr(drafter, "only_reads", False))
        self._takes: Any = getattr(drafter, "takes", None)
        # Asked only once, because the target's steps are set up for what the drafters read.
        if found := self._try("wants", lambda: reader_of(drafter)):
            self._reader, self.wants = found

    @property
    def pages(self) -> tuple[int, int]:
        """Return the KV pages in use and in total; zeros for a drafter without an engine."""
        names = ("pages_in_use", "pages_total")
        found = self._try(
            "pages", lambda: [index(getattr(self._drafter, name, 0)) for name in names]
        )
        in_use, total = (min(max(count, 0), MAX_COUNT) for count in found or (0, 0))
        return in_use, total

    def interrupt(self) -> None:
        """Ask the drafter to end its current slice soon, if it can.  Called from any thread."""
        try:
            if self._interruptible is not None:
                self._interruptible.interrupt()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            # It is not interrupted again, so its slices only take longer.
            self._interruptible = None
            self._log("interrupt", error)

    def tell(self, commits: Sequence[Commit]) -> list[Observation | Refusal]:
        """Tell the drafter of commits; returns one answer for each.

        From then on the tree of a text grows if the drafter holds the whole text and nodes are
        wanted."""
        self._has_failed = False
        started = self._clock()
        answers = self._ask(commits, self._observe)
        self.busy_s += self._clock() - started
        held = self.held
        for commit, answer in zip(commits, answers, strict=True):
            name = commit.request_id
            if isinstance(answer, Refusal):
                self._drop(name)
                continue
            have_len = answer.have_len
            if have_len > 0 or name in held:
                held[name] = answer
            if answer.generation != commit.generation:
                continue  # a late commit of a former owner
            if 0 < have_len == commit.base_len + len(commit.token_ids):
                self._want(name, commit.generation, commit.max_nodes)
        return answers

    def follow(self, texts: Sequence[tuple[RequestState, int]]) -> list[Refusal]:
        """Tell the drafter what it lacks of these texts, each with the nodes that are wanted.

        Returns refusals of those that it does not hold then."""
        short, refused, held = list(texts), list[Refusal](), self.held
        # Twice, for of a text that it has lost it lacks more than it seems.
        for _ in range(2):
            commits = [commit_of(*each, held.get(each[0].request_id), self._told) for each in short]
            answers = self.tell(commits) if short else []
            refused += [each for each in answers if isinstance(each, Refusal)]
            short = [
                each
                for each, answer in zip(short, answers, strict=True)
                if isinstance(answer, Observation) and not self.holds(each[0])
            ]
        for text, _ in short:
            error = ProtocolError(f"it was sent {len(text.text)} tokens and keeps fewer")
            refused.append(self.refuse(text.request_id, text.generation, error))
        return refused

    def _told(self, params: SamplingParams) -> SamplingParams:
        """Return what it is told of the parameters when a text opens."""
        return params

    def holds(self, text: RequestState) -> bool:
        """True if the drafter has all of the text, of the present generation."""
        known = self.held.get(text.request_id)
        wanted = len(text.text), text.generation
        return known is not None and (known.have_len, known.generation) == wanted

    def _want(self, name: str, generation: int, max_nodes: int) -> None:
        if max_nodes > 0:
            self.wanted[name] = self.growing[name] = DraftTask(name, generation, max_nodes)
        else:
            self.wanted.pop(name, None)
            self.growing.pop(name, None)

    def grow_again(self) -> None:
        """Ask for all trees once more: some may have waited for what was told or released."""
        self.growing.update(self.wanted)

    def grow(
        self, texts: Mapping[str, TokenLog] = _NO_TEXTS
    ) -> tuple[list[Proposal], list[Refusal]]:
        """Grow all growing trees by one slice; no proposals means that nothing else will come.

        texts: the texts of the requests, which the trees must continue.
        """
        started = self._clock()
        tasks = list(self.growing.values())
        answers = self._ask(tasks, lambda some: self._propose(some, texts))
        self.busy_s += self._clock() - started
        proposals = [each for each in answers if isinstance(each, Proposal)]
        refusals = [each for each in answers if isinstance(each, Refusal)]
        for proposal in proposals:
            if proposal.is_complete:
                self.growing.pop(proposal.request_id, None)
        if not proposals:
            self.growing.clear()
        elif not self._has_failed:
            self.breaker.record_success()
        return proposals, refusals

    def read(self, rows: Sequence[StepRows]) -> None:
        """Hand the drafter the rows of a step; after a fault it only misses these rows."""
        reader = self._reader
        if reader is None:
            return
        started = self._clock()
        self._try("rows", lambda: reader.read(rows), fault="refused")
        self.busy_s += self._clock() - started

    def num_top(self, request_id: str, tenant: bytes) -> int:
        """Return how many most probable tokens it reads of the request's steps."""
        num_top, takes = self.wants.num_top, self._takes
        if not num_top or takes is None:
            return num_top
        return num_top if self._try("takes", lambda: takes(request_id, tenant)) else 0

    def knows(self, request_id: str) -> bool:
        """True if it may hold anything of the request; one that only reads is not told of any."""
        return self.only_reads or request_id in self.held

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; the drafter ignores unknown ones."""
        for request_id in request_ids:
            self._drop(request_id)
        self._try("release", lambda: self._drafter.release(request_ids), fault="refused")

    def refuse(self, request_id: str, generation: int, error: Exception) -> Refusal:
        """Reset a request over which the drafter is at fault, and return its refusal."""
        self._log(request_id, error)
        self.release([request_id])
        code = error.code if isinstance(error, DrafthouseError) else WorkerError.code
        self._blame(self.breaker.rule(code).fault)
        told = told_of(error, self._drafter, _OURS)
        said = f"the drafter failed with {told}; its state of the request was reset"
        return Refusal(request_id, generation, code, said)

    def note_stall(self, stalled_s: float) -> None:
        """Let the drafter rest after calls that took far too long, until its stalls have cost no
        more than their share of the time."""
        now = self._clock()
        rests_s = self.breaker.record_stall(stalled_s, now)
        if count := self._said.is_due("stalled", now):
            said = "resident drafter stalled name=%s times=%d for_s=%.3f rests_s=%.1f"
            log.warning(said, self.name, count, stalled_s, rests_s)

    def begin(self) -> None:
        """Let one that only reads know that it serves."""
        if self.only_reads and (begin := getattr(self._drafter, "begin", None)):
            self._try("begin", begin)

    def begin_afresh(self, *, keeps_stalls: bool) -> None:
        """Forget faults and times so far, which served no request.  keeps_stalls: except stalls."""
        self.breaker.reset(keeps_stalls=keeps_stalls)
        self._reported_faults.clear()
        self._reported_s = self.busy_s

    def record(self, recorder: Recorder, worker_id: str) -> None:
        """Record the tokens it holds, its drafting time since the last record, and its faults."""
        busy_s, self._reported_s = self.busy_s - self._reported_s, self.busy_s
        if busy_s > 0.0:
            recorder.add(metrics.DRAFT_TIME, busy_s, drafter=self.name)
        recorder.set(metrics.DRAFTER_REQUESTS, len(self.held), drafter=self.name, worker=worker_id)
        for why, count in (self.breaker.faults - self._reported_faults).items():
            recorder.add(metrics.DRAFTER_FAULTS, count, drafter=self.name, why=why)
        self._reported_faults = self.breaker.faults.copy()
        in_use, total = self.pages
        if total:
            own = {"role": "drafter", "worker": f"{worker_id}/{self.name}"}
            recorder.set(metrics.KV_PAGES_IN_USE, in_use, **own)
            recorder.set(metrics.KV_PAGES_TOTAL, total, **own)

    def _drop(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        self._want(request_id, 0, 0)

    def _ask(
        self, asked: Sequence[Asked], call: Callable[[Sequence[Asked]], list[Answer | Refusal]]
    ) -> list[Answer | Refusal]:
        """Ask the drafter about a batch.  If that fails, ask about each entry alone, so that only
        the faulty one is refused.

        Observing a commit twice is harmless.
        """
        try:
            return call(asked)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            if len(asked) == 1:
                return [self.refuse(asked[0].request_id, asked[0].generation, error)]
            return [answer for each in asked for answer in self._ask([each], call)]

    def _observe(self, commits: Sequence[Commit]) -> list[Observation | Refusal]:
        answers = list(self._drafter.observe(commits))
        if len(answers) != len(commits):
            raise ProtocolError(
                f"the drafter answered {len(commits)} commits with {len(answers)} observations"
            )
        return [
            checked_observation(commit, answer)
            for commit, answer in zip(commits, answers, strict=True)
        ]

    def _propose(
        self, tasks: Sequence[DraftTask], texts: Mapping[str, TokenLog]
    ) -> list[Proposal | Refusal]:
        """Return the sound proposals for these tasks.  An unsound one resets its request, as an
        exception does."""
        proposals = list(self._drafter.propose(tasks))
        problems = problems_of_proposals(proposals, self._vocab_size)
        if any(problems):
            proposals = [narrowed(each) for each in proposals]
            problems = problems_of_proposals(proposals, self._vocab_size)
        generations = {task.request_id: task.generation for task in tasks}
        found: list[Proposal | Refusal] = []
        refused: dict[str, str] = {}
        for proposal, problem in zip(proposals, problems, strict=True):
            name: Any = getattr(proposal, "request_id", None)
            is_known = isinstance(name, str) and name in generations
            if problem is None:
                if not is_known or proposal.generation != generations[name]:
                    continue
                text = texts.get(name)
                problem = None if text is None else problem_in_text(proposal, text)
            if problem is None:
                found.append(proposal)
            else:
                refused.update(dict.fromkeys([name] if is_known else generations, problem))
        return [each for each in found if each.request_id not in refused] + [
            self.refuse(name, generations[name], ProtocolError(problem))
            for name, problem in refused.items()
        ]

    def _blame(self, fault: str) -> None:
        if fault:
            self._has_failed = True
            self.breaker.record_failure(fault, self._clock())

    def _try(self, what: str, call: Callable[[], T], fault: str = "") -> T | None:
        """Return the result of a call that concerns no single request; None if it raises.

        fault: the reason under which an exception is counted."""
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._log(what, error)
            self._blame(fault)
            return None

    def _log(self, what: str, error: Exception) -> None:
        told = told_of(error, self._drafter, _OURS)
        count = self._said.is_due(told, self._clock())
        if count:
            log.warning(
                "drafter failed drafter=%s request=%s times=%d: %s", self.name, what, count, told
            )
