"""Calls a drafter and contains its faults: an exception or a malformed answer costs the request in
question its drafts, and nothing else."""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import index
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from cluster.core import Commit, DraftTask, Observation, Proposal, TokenTree
from cluster.draft.base import Drafter, Interruptible
from cluster.draft.inside import WANTS_NOTHING, StepReader, StepRows, StepWants
from cluster.draft.once_a_minute import OnceAMinute
from cluster.errors import CapacityError, DrafthouseError, ProtocolError, WorkerError
from cluster.messages import Refusal
from cluster.spec.tree_check import ANY_VOCABULARY, problems_of_proposals

log = logging.getLogger(__name__)

# Counts travel in 32 bits.
_MAX_COUNT = (1 << 32) - 1


@runtime_checkable
class HasPages(Protocol):
    """Optional protocol for drafters: the KV pages that they use, and how many there are."""

    @property
    def pages_in_use(self) -> int: ...

    @property
    def pages_total(self) -> int: ...


class ContainedDrafter:
    """Calls a drafter and turns its exceptions into refusals.

    num_failures: failed calls since the last one that succeeded.  busy_s: seconds spent in observe
    and propose.
    """

    def __init__(
        self,
        drafter: Drafter,
        name: str,
        clock: Callable[[], float],
        vocab_size: int = ANY_VOCABULARY,
    ) -> None:
        self._drafter = drafter
        self._vocab_size = vocab_size
        self._pages: HasPages | None = None
        self._reader: StepReader | None = None
        self.wants = WANTS_NOTHING
        self._interruptible = drafter if isinstance(drafter, Interruptible) else None
        self._name = name
        self._clock = clock
        self._said = OnceAMinute()
        self.num_failures = 0
        self.busy_s = 0.0
        self._ask_wants(drafter)
        self._ask_pages(drafter)

    def _ask_pages(self, drafter: Drafter) -> None:
        try:
            self._pages = drafter if isinstance(drafter, HasPages) else None  # that reads them
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._log("pages", error)

    def _ask_wants(self, drafter: Drafter) -> None:
        """Once: what is wanted of the target's steps decides how those are run."""
        try:
            if isinstance(drafter, StepReader):
                wants = drafter.wants
                self.wants = StepWants(tuple(map(index, wants.taps)), max(index(wants.num_top), 0))
                self._reader = drafter
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._log("wants", error)

    @property
    def pages(self) -> tuple[int, int]:
        """KV pages in use, and all of them; zeros for a drafter without an engine."""
        if self._pages is None:
            return 0, 0
        try:
            in_use, total = index(self._pages.pages_in_use), index(self._pages.pages_total)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self._pages = None  # it is not asked again
            self._log("pages", error)
            return 0, 0
        return min(max(in_use, 0), _MAX_COUNT), min(max(total, 0), _MAX_COUNT)

    def interrupt(self) -> None:
        """Ask the drafter to end its current slice soon, if it can.  Called from any thread."""
        if self._interruptible is None:
            return
        try:
            self._interruptible.interrupt()
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            # It is not asked again; its slices only take longer.
            self._interruptible = None
            self._log("interrupt", error)

    def observe(self, commits: Sequence[Commit]) -> list[Observation | Refusal]:
        """One answer per commit."""
        started = self._clock()
        answers = self._observe(commits)
        self.busy_s += self._clock() - started
        return [
            _declined(commit, answer) or answer
            for commit, answer in zip(commits, answers, strict=True)
        ]

    def read(self, rows: Sequence[StepRows]) -> bool:
        """Hand it the rows of a step; False where it raised, which costs it those rows alone."""
        if self._reader is None:
            return True
        started = self._clock()
        try:
            self._reader.read(rows)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self.num_failures += 1
            self._log("rows", error)
            return False
        finally:
            self.busy_s += self._clock() - started
        return True

    def _observe(self, commits: Sequence[Commit]) -> list[Observation | Refusal]:
        """Repeats a batch that fails one commit at a time, so that only the faulty one is refused.

        Observing a commit twice is harmless.
        """
        try:
            answers: list[Observation | Refusal] = list(self._drafter.observe(commits))
            if len(answers) != len(commits):
                raise ProtocolError(
                    f"the drafter answered {len(commits)} commits with {len(answers)} observations"
                )
            for commit, answer in zip(commits, answers, strict=True):
                _check_observation(commit, answer)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            if len(commits) == 1:
                return [self._refused(commits[0].request_id, commits[0].generation, error)]
            return [answer for commit in commits for answer in self._observe([commit])]
        self.num_failures = 0
        return answers

    def propose(self, tasks: Sequence[DraftTask]) -> tuple[list[Proposal], list[Refusal]]:
        """One slice of growth."""
        started = self._clock()
        proposals, refusals = self._propose(tasks)
        self.busy_s += self._clock() - started
        return proposals, refusals

    def _propose(self, tasks: Sequence[DraftTask]) -> tuple[list[Proposal], list[Refusal]]:
        try:
            proposals = [_exactly_typed(each) for each in self._drafter.propose(tasks)]
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            if len(tasks) == 1:
                return [], [self._refused(tasks[0].request_id, tasks[0].generation, error)]
            results = [self._propose([task]) for task in tasks]
            return (
                [each for proposals, _ in results for each in proposals],
                [each for _, refusals in results for each in refusals],
            )
        self.num_failures = 0
        return self._checked(tasks, proposals)

    def _checked(
        self, tasks: Sequence[DraftTask], proposals: Sequence[Proposal]
    ) -> tuple[list[Proposal], list[Refusal]]:
        """The valid proposals.  An invalid one resets its request, as an exception does."""
        generations = {task.request_id: task.generation for task in tasks}
        sound: list[Proposal] = []
        refusals: list[Refusal] = []
        problems = problems_of_proposals(proposals, self._vocab_size)
        for proposal, problem in zip(proposals, problems, strict=True):
            if problem is None:
                sound.append(proposal)
                continue
            name = getattr(proposal, "request_id", None)
            known = [name] if isinstance(name, str) and name in generations else list(generations)
            refusals += [
                self._refused(each, generations[each], ProtocolError(problem)) for each in known
            ]
        refused = {refusal.request_id for refusal in refusals}
        return [each for each in sound if each.request_id not in refused], refusals

    def release(self, request_ids: Sequence[str]) -> None:
        """Forget these requests; the drafter ignores unknown ones."""
        try:
            self._drafter.release(request_ids)
        except Exception as error:  # noqa: BLE001 - a plug-in may raise anything
            self.num_failures += 1
            self._log("release", error)

    def _refused(self, request_id: str, generation: int, error: Exception) -> Refusal:
        """Reset a request over which the drafter raised, and return its refusal."""
        self.num_failures += 1
        self._log(request_id, error)
        self.release([request_id])
        code = error.code if isinstance(error, DrafthouseError) else WorkerError.code
        told = f"the drafter failed with {self._told(error)}; its state of the request was reset"
        return Refusal(request_id, generation, code, told)

    def _log(self, what: str, error: Exception) -> None:
        told = self._told(error)
        count = self._said.is_due(told, self._clock())
        if count:
            log.warning(
                "drafter failed drafter=%s request=%s times=%d: %s", self._name, what, count, told
            )

    def _told(self, error: Exception) -> str:
        """An error's type and where in the drafter's own file, or below it, it was raised.

        Its message may quote the prompt; only what we say of an answer that is none does not.
        """
        kind = type(error).__name__
        places = [(frame.f_code.co_filename, line)
                  for frame, line in traceback.walk_tb(error.__traceback__)]  # fmt: skip
        theirs = [place for place in places if place[0] != __file__]
        if not theirs:
            is_ours = isinstance(error, ProtocolError)
            return f"{kind}: {error}" if is_ours else f"{kind} over what it answered"
        own = getattr(sys.modules.get(type(self._drafter).__module__), "__file__", None)
        path, line = next((place for place in reversed(theirs) if place[0] == own), theirs[-1])
        return f"{kind} ({path}, line {line})"


def _exactly_typed(proposal: Proposal) -> Proposal:
    """The proposal with int32 and float32 arrays.

    NumPy makes wider ones by default; they are converted if that loses nothing.
    """
    if not (isinstance(proposal, Proposal) and isinstance(proposal.tree, TokenTree)):
        return proposal
    arrays = (proposal.tree.token_ids, proposal.tree.parents, proposal.survival)
    token_ids, parents = (_narrowed(array, "i", np.int32) for array in arrays[:2])
    survival = _narrowed(arrays[2], "f", np.float32)
    if token_ids is arrays[0] and parents is arrays[1] and survival is arrays[2]:
        return proposal
    return replace(proposal, tree=TokenTree(token_ids, parents), survival=survival)


def _narrowed(array: Any, kind: str, dtype: type) -> Any:
    if not isinstance(array, np.ndarray) or array.dtype == dtype or array.dtype.kind != kind:
        return array
    narrow: npt.NDArray[Any] = array.astype(dtype)
    return narrow if kind == "f" or np.array_equal(narrow, array) else array


def _check_observation(commit: Commit, answer: object) -> None:
    """Raise ProtocolError unless this is a possible answer to the commit."""
    if not isinstance(answer, Observation):
        raise ProtocolError(f"a drafter answered a commit with a {type(answer).__name__}")
    is_named = isinstance(answer.request_id, str) and answer.request_id == commit.request_id
    counts = answer.generation, answer.have_len
    is_counted = all(isinstance(each, (int, np.integer)) and each >= 0 for each in counts)
    if not (is_named and is_counted and answer.have_len <= _MAX_COUNT):
        raise ProtocolError("a drafter's observation names another request, or counts no tokens")
    if not isinstance(answer.log_loss, (int, float, np.floating, type(None))):
        raise ProtocolError(f"a drafter's log_loss is a {type(answer.log_loss).__name__}")


def _declined(commit: Commit, answer: Observation | Refusal) -> Refusal | None:
    """The refusal for a request of which the drafter takes nothing, else None.

    It would not take the text next time either, and without a refusal the coordinator would send
    the prompt again and again.
    """
    if not isinstance(answer, Observation) or answer.have_len > 0:
        return None
    if commit.base_len > 0 or len(commit.token_ids) == 0 or answer.generation > commit.generation:
        return None
    if commit.prefix_hash != 0:
        return Refusal(
            commit.request_id,
            commit.generation,
            ProtocolError.code,
            f"a commit from the start has prefix hash {commit.prefix_hash}; that of no token is 0",
        )
    return Refusal(
        commit.request_id,
        commit.generation,
        CapacityError.code,
        "the drafter holds as many requests as it may; raise its max_requests or add a replica",
    )
