"""A target worker with drafters inside, on a toy engine, and a coordinator that leads it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cluster.breaker import CircuitBreaker
from cluster.core import Commit, DraftTask, Observation, Proposal, TokenTree, token_array
from cluster.draft.base import Drafter
from cluster.draft.committed_text import RequestState, RequestTable, common_len
from cluster.messages import WorkerDescription
from cluster.rpc.memory import MemoryLink, memory_pair
from cluster.worker.resident import ResidentDrafter
from cluster.worker.residents import Residents
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Verifier
from tests.support.coordinator.house import House, house
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 32
RESET_S = 2.0


class GreedyOracle:
    """Drafts a chain of what the toy target says at temperature 0, and remembers its calls."""

    def __init__(self, length: int = 4, name: str = "a") -> None:
        self.length, self.name = length, name
        self.commits: list[Commit] = []
        self.tasks: list[DraftTask] = []
        self.released: list[str] = []
        self.has_released = threading.Event()
        self._law = hashed_law(VOCAB_SIZE)
        self.requests: RequestTable[RequestState] = RequestTable(64, self._opened)

    def _opened(self, commit: Commit) -> RequestState:
        assert commit.params is not None
        return RequestState(commit.generation, commit.prompt_len, commit.task, commit.params)

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self.commits.extend(commits)
        return [self._observe(commit) for commit in commits]

    def _observe(self, commit: Commit) -> Observation:
        state = self.requests.admit(commit)
        if state is None:
            return self.requests.declined(commit)
        kept = common_len(state.text, commit)
        state.text.truncate(kept)
        state.text.append(commit.token_ids[kept - commit.base_len :])
        return Observation(commit.request_id, commit.generation, len(state.text))

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.tasks.extend(tasks)
        return [self._proposal(task) for task in tasks]

    def _proposal(self, task: DraftTask) -> Proposal:
        state = self.requests.get(task.request_id, task.generation)
        assert state is not None
        ahead = state.text.token_ids.tolist()
        for _ in range(min(self.length, task.max_nodes)):
            ahead.append(int(np.argmax(self._law(ahead))))
        drafts = token_array(ahead[len(state.text) :])
        return Proposal(
            task.request_id, task.generation, len(state.text), state.text.hash_at(len(state.text)),
            TokenTree.chain(drafts), np.full(len(drafts), 0.9, np.float32), self.name, True,
        )  # fmt: skip

    def release(self, request_ids: Sequence[str]) -> None:
        self.released.extend(request_ids)
        for request_id in request_ids:
            self.requests.pop(request_id)
        self.has_released.set()


def resident(
    drafter: Drafter, name: str = "a", clock: Callable[[], float] = time.perf_counter, **limits: Any
) -> ResidentDrafter:
    breaker = CircuitBreaker(limits.get("failures", 3), limits.get("reset_s", RESET_S))
    return ResidentDrafter(name, drafter, VOCAB_SIZE, breaker, RESET_S, clock)


@dataclass
class Stage:
    """house: a coordinator.  worker: its target."""

    house: House
    worker: TargetWorker
    link: MemoryLink[Any, Any]


def worker_of(
    drafters: Mapping[str, Drafter],
    engine: ToyEngine | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> TargetWorker:
    """A target worker with these drafters inside, not started."""
    engine = engine or ToyEngine(hashed_law(VOCAB_SIZE), VOCAB_SIZE)
    residents = Residents([resident(each, name, clock) for name, each in drafters.items()], clock)
    description = WorkerDescription(
        "w", "target", "toy", model_hash="m", tokenizer_hash="t", vocab_size=VOCAB_SIZE,
        max_context_len=4096, max_running_sequences=64, max_batch_tokens=512,
        residents=residents.names, look_ups=residents.look_ups,
    )  # fmt: skip
    return TargetWorker(Verifier(engine, clock, wants=residents.wants), description, residents)


@asynccontextmanager
async def hosted(
    drafters: Mapping[str, Drafter], engine: ToyEngine | None = None, **settings: Any
) -> AsyncIterator[Stage]:
    """drafters: those inside the target.  settings: of the coordinator; pool: names beside them;
    clock: of the worker."""
    names = (*drafters, *settings.pop("pool", ()))
    worker = worker_of(drafters, engine, settings.pop("clock", time.perf_counter))
    worker.start()
    try:
        async with house(names, **{"budget": "fixed", **settings}) as running:
            yield Stage(running, worker, join(running, worker))
    finally:
        await asyncio.to_thread(worker.stop)


def join(running: House, worker: TargetWorker, target_id: str = "t") -> MemoryLink[Any, Any]:
    """Let a worker that was started serve the coordinator; returns the coordinator's end."""
    ours, theirs = memory_pair()
    running.tasks.append(asyncio.create_task(worker.serve(theirs)))
    running.coordinator.add_target(target_id, worker.describe(), ours)
    return ours
