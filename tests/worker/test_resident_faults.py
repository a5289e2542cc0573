"""Residents that raise, lie, stall or never end: counted, left alone, and nobody's text changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.core import (
    EMPTY_TREE,
    Commit,
    DraftTask,
    Observation,
    Proposal,
    SamplingParams,
    TokenTree,
    token_array,
)
from cluster.errors import ProtocolError, RequestError, WorkerError
from cluster.messages import ProposalFrame
from cluster.token_log import TokenLog
from cluster.worker.resident import ResidentDrafter, ResidentText
from tests.support.coordinator.house import GREEDY, SEEDED, FakeClock, collect, request, text_of
from tests.support.worker.residents import RESET_S, GreedyOracle, hosted, resident
from tests.worker.test_lying_plugins import OBSERVATIONS, PROPOSALS

PARAMS = [replace(GREEDY, max_tokens=60), replace(SEEDED, max_tokens=60)]
LAWS = pytest.mark.parametrize("params", PARAMS, ids=["greedy", "seeded"])


class Faulty(GreedyOracle):
    """Raises in every tenth call, at first in its third."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error
        self.num_calls = 0

    def _count(self) -> None:
        self.num_calls += 1
        if self.num_calls % 10 == 3:
            raise self.error

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self._count()
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._count()
        return super().propose(tasks)


async def plain(params: SamplingParams) -> list[int]:
    async with hosted({}) as stage:
        return text_of(await collect(stage.house.coordinator, request(params=params)))


@LAWS
@pytest.mark.parametrize(
    "error", [ValueError("no"), MemoryError(), WorkerError("lost"), RequestError("too long")]
)
async def test_one_that_raises_in_every_tenth_call_changes_no_text(
    error: Exception, params: SamplingParams
) -> None:
    drafter = Faulty(error)
    async with hosted({"a": drafter}, breaker_reset_s=0.0) as stage:
        texts = []
        for index in range(4):
            asked = request(params=params, id=f"r{index}")
            texts.append(text_of(await collect(stage.house.coordinator, asked)))
        metrics = stage.house.coordinator.render_metrics().decode()
        assert stage.worker.healthy
    assert texts == [await plain(params)] * 4
    assert drafter.num_calls > 3
    is_counted = 'drafthouse_drafter_faults_total{drafter="a",why="refused"}' in metrics
    assert is_counted != isinstance(error, RequestError)


class Liar(GreedyOracle):
    """Honest in its first answer and in every third one after that."""

    def __init__(self, proposes: Any = None, observes: Any = None) -> None:
        super().__init__()
        self.proposes, self.observes = proposes, observes
        self.num_lies = self._num_answers = 0

    def _lies(self) -> bool:
        self._num_answers += 1
        lies = self._num_answers % 3 != 1
        self.num_lies += lies
        return lies

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Any]:
        honest = super().propose(tasks)
        if self.proposes is None or not self._lies():
            return honest
        return [self.proposes(proposal) for proposal in honest]

    def observe(self, commits: Sequence[Commit]) -> Sequence[Any]:
        honest = super().observe(commits)
        if self.observes is None or not self._lies():
            return honest
        return [self.observes(observation) for observation in honest]


WRONG_TEXTS = {
    "another text": lambda honest: replace(honest, prefix_hash=honest.prefix_hash ^ 1),
    "a longer text": lambda honest: replace(honest, base_len=honest.base_len + 3),
    "a vocabulary of its own": lambda honest: replace(
        honest, tree=TokenTree.chain([99]), survival=np.ones(1, np.float32)
    ),
}
LIES = {
    **{f"tree: {name}": {"proposes": lie} for name, lie in {**PROPOSALS, **WRONG_TEXTS}.items()},
    **{f"observation: {name}": {"observes": lie} for name, lie in OBSERVATIONS.items()},
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
async def test_no_lie_changes_a_text_or_ends_the_target(lie: dict[str, Any]) -> None:
    liar = Liar(**lie)
    async with hosted({"a": liar}, breaker_failures=1000, breaker_reset_s=0.0) as stage:
        texts = [
            text_of(await collect(stage.house.coordinator, request(params=params, id=f"r{index}")))
            for index, params in enumerate(PARAMS)
        ]
        assert stage.worker.healthy
    assert texts == [await plain(params) for params in PARAMS]
    assert liar.num_lies


def text(tokens: Sequence[int] = (1, 2, 3), draft_nodes: int = 4, name: str = "r") -> ResidentText:
    return ResidentText(
        name, 1, len(tokens), GREEDY, "default", b"", frozenset("a"), TokenLog(token_array(tokens)),
        draft_nodes,
    )  # fmt: skip


def drafted(drafter: ResidentDrafter, *texts: ResidentText, now: float) -> ProposalFrame:
    frame, _ = drafter.draft(texts, 0.01, now + 0.01)
    assert frame is not None
    return frame


class Broken(GreedyOracle):
    """Raises whenever it is asked for a tree."""

    is_broken = True

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        if self.is_broken:
            raise ValueError("broken")
        return super().propose(tasks)


def test_the_breaker_opens_after_faults_in_a_row_and_closes_again() -> None:
    clock, broken = FakeClock(), Broken()
    drafter = resident(broken, clock=clock, failures=3)
    for index in range(3):
        frame = drafted(drafter, text(name=f"r{index}"), now=clock.now)
        assert [refusal.code for refusal in frame.refusals] == [WorkerError.code]
    num_commits = len(broken.commits)
    frame = drafted(drafter, text(name="r3"), now=clock.now)
    assert [each.request_id for each in frame.completions] == ["r3"]
    assert len(broken.commits) == num_commits
    broken.is_broken = False
    clock.now += RESET_S
    frame = drafted(drafter, text(name="r3"), now=clock.now)
    assert [len(each.tree) for each in frame.proposals] == [4]


def test_a_request_that_was_refused_is_kept_from_the_drafter_for_a_while() -> None:
    clock, broken = FakeClock(), Broken()
    drafter = resident(broken, clock=clock, failures=100)
    kept = text()
    assert drafted(drafter, kept, now=clock.now).refusals
    broken.is_broken = False
    assert not drafted(drafter, kept, now=clock.now).proposals
    clock.now += RESET_S
    # The drafter was reset, and hears the text from its beginning.
    assert drafted(drafter, kept, now=clock.now).proposals
    assert broken.commits[-1].base_len == 0
    assert broken.commits[-1].params is GREEDY


class Sleeping(GreedyOracle):
    """Takes a second of the clock for a tree."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.clock.now += 1.0
        return super().propose(tasks)


def test_what_stalls_take_is_bounded_by_a_share_of_the_time() -> None:
    clock = FakeClock()
    sleeping = Sleeping(clock)
    drafter = resident(sleeping, clock=clock)
    kept, began, num_stalls = text(), clock.now, 0
    while clock.now < began + 1000.0:
        clock.now += 0.02
        frame, stalled_s = drafter.draft([kept], 0.01, clock.now + 0.01)
        assert frame is not None
        num_stalls += stalled_s > 0.0
        said = {each.request_id for each in (*frame.proposals, *frame.completions)}
        assert said == {"r"}  # whether it drafts or rests
    assert 15 <= num_stalls <= 22  # a fiftieth of the time, in seconds
    assert num_stalls == len(sleeping.tasks)


class Endless(GreedyOracle):
    """Reads a prompt without end: every slice takes time and brings an empty tree."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.tasks.extend(tasks)
        self.clock.now += 0.003
        empty = EMPTY_TREE
        return [
            Proposal(
                task.request_id, 1, 3, text().tokens.hash_at(3), empty, np.empty(0, np.float32)
            )
            for task in tasks
        ]


def test_a_turn_ends_with_its_time_whatever_is_left_to_grow() -> None:
    clock = FakeClock()
    endless = Endless(clock)
    drafter = resident(endless, clock=clock)
    frame, stalled_s = drafter.draft([text()], 0.01, clock.now + 0.01)
    assert frame is not None
    assert len(endless.tasks) == 4
    assert stalled_s == 0.0
    assert frame.proposals == ()
    assert [each.request_id for each in frame.completions] == ["r"]
    assert frame.draft_time_s == pytest.approx(0.012)


class Lavish(GreedyOracle):
    """Drafts four nodes for each that it is asked for."""

    def _proposal(self, task: DraftTask) -> Proposal:
        return super()._proposal(replace(task, max_nodes=4 * task.max_nodes))


def test_no_tree_has_more_nodes_than_were_asked_for() -> None:
    frame = drafted(resident(Lavish(16), clock=FakeClock()), text(draft_nodes=3), now=1000.0)
    (proposal,) = frame.proposals
    assert proposal.tree.parents.tolist() == [-1, 0, 1]
    assert len(proposal.survival) == 3


class Forgetful(GreedyOracle):
    """Keeps no text beyond four tokens, and says so."""

    def _observe(self, commit: Commit) -> Observation:
        super()._observe(commit)
        state = self.requests.get(commit.request_id, commit.generation)
        if state is None:
            return self.requests.declined(commit)
        state.text.truncate(4)
        return Observation(commit.request_id, commit.generation, len(state.text))


def test_one_that_keeps_less_than_it_is_sent_is_sent_the_rest_once() -> None:
    forgetful = Forgetful()
    drafter = resident(forgetful, clock=FakeClock())
    frame = drafted(drafter, text(range(9)), now=1000.0)
    assert [(each.base_len, len(each.token_ids)) for each in forgetful.commits] == [(0, 9), (4, 5)]
    assert [refusal.code for refusal in frame.refusals] == [ProtocolError.code]


class LookUp(GreedyOracle):
    is_look_up = True


def test_a_look_up_that_is_asked_for_nothing_hears_of_a_text_now_and_then() -> None:
    oracle = LookUp()
    drafter = resident(oracle, clock=FakeClock())
    kept = text(draft_nodes=0)
    for token in range(200):
        kept.tokens.append(token_array([token % 32]))
        frame, _ = drafter.draft([kept], 0.01, 1000.01)
        assert frame is None
    lengths = [commit.base_len + len(commit.token_ids) for commit in oracle.commits]
    assert lengths == [64, 128, 192]
    assert oracle.tasks == []


def test_a_model_reads_a_text_when_it_is_first_asked_and_says_so() -> None:
    oracle = GreedyOracle()
    drafter = resident(oracle, clock=FakeClock())
    kept = text(range(100), draft_nodes=4)
    kept.only_look_ups = True
    assert drafter.draft([kept], 0.01, 1000.01) == (None, 0.0)
    assert oracle.commits == []
    kept.only_look_ups = False
    frame = drafted(drafter, kept, now=1000.0)
    assert len(oracle.commits) == len(frame.proposals) == 1
    assert drafter.num_read == 1
    kept.tokens.append(token_array([7]))
    drafted(drafter, kept, now=1000.0)
    assert drafter.num_read == 0
    kept.only_look_ups = True
    kept.tokens.append(token_array([7] * 100))
    assert drafter.draft([kept], 0.01, 1000.01) == (None, 0.0)
    assert len(oracle.commits) == 2


def test_a_look_up_is_asked_beside_models_and_without_them() -> None:
    for only_look_ups in (False, True):
        kept = text(draft_nodes=4)
        kept.only_look_ups = only_look_ups
        frame = drafted(resident(LookUp(), clock=FakeClock()), kept, now=1000.0)
        assert len(frame.proposals) == 1
