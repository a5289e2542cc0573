"""Drafters that run inside a target."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cluster.core import Commit, Observation, Proposal, TokenTree, token_array
from cluster.draft.base import Drafter, DrafterContext, DraftTask
from cluster.draft.breaker import CircuitBreaker
from cluster.draft.committed_text import CommittedTextDrafter, RequestState
from cluster.rpc.messages import Open, StepReport
from cluster.spec.budget import Ask
from cluster.worker.residents import ResidentDrafter
from cluster.worker.texts import TargetText
from tests.support.worker.texts import GREEDY, VOCAB_SIZE
from tests.support.worker.toy_engine import hashed_law

RESET_S = 2.0
# A step after which residents have as much time as they want.
LONG_STEP = StepReport(step_time_s=1.0)


class GreedyOracle(CommittedTextDrafter[RequestState]):
    """Drafts a chain of what the toy target says at temperature 0, and remembers its calls."""

    def __init__(self, length: int = 4, name: str = "a") -> None:
        super().__init__(DrafterContext(name, length, 64), RequestState.opened_by)
        self.length = length
        self.commits: list[Commit] = []
        self.tasks: list[DraftTask] = []
        self.released: list[str] = []
        self.has_released = threading.Event()
        self._law = hashed_law(VOCAB_SIZE)

    def _forget_tree(self, request: RequestState) -> None:
        """It keeps none."""

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self.commits.extend(commits)
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.tasks.extend(tasks)
        return [self._proposal(task) for task in tasks]

    def _proposal(self, task: DraftTask) -> Proposal:
        state = self._requests.get(task.request_id, task.generation)
        ahead = state.text.token_ids.tolist()
        for _ in range(min(self.length, task.max_nodes)):
            ahead.append(int(np.argmax(self._law(ahead))))
        drafts = token_array(ahead[len(state.text) :])
        survival = np.full(len(drafts), 0.9, np.float32)
        return state.proposed(TokenTree.chain(drafts), survival, self._name)

    def release(self, request_ids: Sequence[str]) -> None:
        self.released.extend(request_ids)
        super().release(request_ids)
        self.has_released.set()


def resident(
    drafter: Drafter, name: str = "a", clock: Callable[[], float] = time.perf_counter, **limits: Any
) -> ResidentDrafter:
    breaker = CircuitBreaker(limits.get("failures", 3), limits.get("reset_s", RESET_S))
    is_believed = bool(limits.get("is_believed"))
    return ResidentDrafter(name, drafter, VOCAB_SIZE, breaker, clock, is_believed=is_believed)


def resident_text(
    tokens: Sequence[int] = (1, 2, 3), draft_nodes: int = 4, name: str = "r"
) -> TargetText:
    ids, many = token_array(tokens), 1 << 20
    text = TargetText(name, Open(name, 1, ids, 0, len(ids), GREEDY, many, drafters=tuple("abc")))
    text.ask, text.cap = Ask(draft_nodes), many
    return text


def drafted(drafter: ResidentDrafter, *texts: TargetText, now: float) -> Sequence[Proposal]:
    trees, _ = drafter.draft(texts, 0.01, now + 0.01)
    return trees
