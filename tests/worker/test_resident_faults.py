"""Residents that raise, lie, stall or never end: counted, left alone, and nobody's text changes."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from cluster import metrics
from cluster.core import (
    EMPTY_FLOATS,
    EMPTY_TREE,
    Commit,
    Observation,
    Proposal,
    SamplingParams,
    TokenTree,
)
from cluster.draft.base import DraftTask
from cluster.engine.work import Output
from cluster.errors import RequestError, WorkerError
from cluster.rpc.messages import StepReport
from cluster.worker.residents import Residents
from tests.support.clock import FakeClock
from tests.support.worker.residents import RESET_S, GreedyOracle, drafted, resident, resident_text
from tests.support.worker.steps import Steps, desk_of, steps, written
from tests.support.worker.texts import GREEDY, LAWS, SEEDED, opened, plain
from tests.support.worker.toy_engine import ToyEngine
from tests.worker.test_lying_plugins import LIES, Lying


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


async def texts_of(target: Steps, asked: Sequence[SamplingParams]) -> list[list[int]]:
    """Texts, one after the other."""
    desk = target.connect()
    for index, params in enumerate(asked):
        desk.post(opened(f"r{index}", params=params, drafters=("a",)))
        await target.run()
    assert not any(desk.refusals.values())
    return [desk.text(f"r{index}") for index in range(len(asked))]


def faults_of(target: Steps) -> dict[str, float]:
    """Of the resident "a", by why."""
    faults = target.told(metrics.DRAFTER_FAULTS)
    assert all(drafter == "a" for drafter, _ in faults)
    return {why: count for (_, why), count in faults.items()}


@LAWS
@pytest.mark.parametrize(
    "error", [ValueError("no"), MemoryError(), WorkerError("lost"), RequestError("too long")]
)
async def test_one_that_raises_in_every_tenth_call_changes_no_text(
    error: Exception, params: SamplingParams
):
    drafter = Faulty(error)
    async with steps(residents=[resident(drafter, clock=FakeClock(), reset_s=0.0)]) as target:
        assert await texts_of(target, [params] * 4) == [plain(params=params)] * 4
        assert target.loop.texts.broken is None
        faults = faults_of(target)
    assert drafter.num_calls > 3
    # A text that it cannot serve is no fault of it.
    assert faults.keys() == (set() if isinstance(error, RequestError) else {"refused"})


def test_a_base_that_numpy_counts_in_few_bits_does_not_wrap():
    class Narrow(GreedyOracle):
        def _proposal(self, task: DraftTask) -> Proposal:
            return replace(super()._proposal(task), base_len=np.uint8(3))  # type: ignore[arg-type]

    (tree,) = drafted(resident(Narrow()), resident_text(), now=0.0)

    assert tree.base_len + 256 == 259


class Liar(Lying, GreedyOracle):
    pass


WRONG = {
    "another text": lambda honest: replace(honest, prefix_hash=honest.prefix_hash ^ 1),
    "a longer text": lambda honest: replace(honest, base_len=honest.base_len + 3),
    "a vocabulary of its own": lambda honest: replace(
        honest, tree=TokenTree.chain([99]), survival=np.ones(1, np.float32)
    ),
}
ALL = {**LIES, **{name: {"proposes": lie} for name, lie in WRONG.items()}}


@pytest.mark.parametrize("name", ALL)
async def test_no_lie_changes_a_text_or_ends_the_target(name: str):
    liar = Liar(**ALL[name])
    residents = [resident(liar, clock=FakeClock(), failures=1000, reset_s=0.0)]
    async with steps(residents=residents) as target:
        assert await texts_of(target, [GREEDY, SEEDED]) == [plain(), plain(params=SEEDED)]
        assert target.loop.texts.broken is None
        faults = faults_of(target)
    assert liar.num_answers > 1
    # What is said of a text that nobody asked for is passed over.
    assert faults.keys() == (set() if "a request of another" in name else {"rubbish"})


class Broken(GreedyOracle):
    """Raises whenever it is asked for a tree."""

    is_broken = True

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        if self.is_broken:
            raise ValueError("broken")
        return super().propose(tasks)


def test_the_breaker_opens_after_faults_in_a_row_and_closes_again():
    clock, broken = FakeClock(), Broken()
    drafter = resident(broken, clock=clock, failures=3)
    for index in range(3):
        assert drafted(drafter, resident_text(name=f"r{index}"), now=clock.now) == []
    assert drafted(drafter, resident_text(name="r3"), now=clock.now) == []
    assert len(broken.commits) == 3
    broken.is_broken = False
    clock.now += RESET_S
    assert [
        len(each.tree) for each in drafted(drafter, resident_text(name="r3"), now=clock.now)
    ] == [4]


def test_a_request_that_was_refused_is_kept_from_the_drafter_for_a_while():
    clock, broken = FakeClock(), Broken()
    drafter = resident(broken, clock=clock, failures=100)
    kept = resident_text()
    assert not drafted(drafter, kept, now=clock.now)
    broken.is_broken = False
    assert not drafted(drafter, kept, now=clock.now)
    assert len(broken.commits) == 1
    clock.now += RESET_S
    # The drafter was reset, and hears the text from its beginning.
    assert drafted(drafter, kept, now=clock.now)
    assert broken.commits[-1].base_len == 0
    assert broken.commits[-1].params is GREEDY


class Endless(GreedyOracle):
    """Reads a prompt without end: every slice takes time and brings an empty tree."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self.clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.tasks.extend(tasks)
        self.clock.now += 0.003
        first = resident_text().tokens.hash_at(3)
        return [Proposal(task.request_id, 1, 3, first, EMPTY_TREE, EMPTY_FLOATS) for task in tasks]


def test_a_turn_ends_with_its_time_whatever_is_left_to_grow():
    clock = FakeClock()
    endless = Endless(clock)
    drafter = resident(endless, clock=clock)
    assert drafter.draft([resident_text()], 0.01, clock.now + 0.01) == ([], False)
    assert len(endless.tasks) == 4
    assert clock.now == pytest.approx(1000.012)
    drafted(drafter, resident_text(), now=clock.now)
    assert drafter.turn.num_read == 1  # which is no measurement of drafting


@pytest.mark.parametrize(
    ("plain_s", "chunk_s", "reading_s"),
    [(0.02, 1.0, 0.05), (0.2, 1.0, 0.2), (0.02, 0.03, 0.03)],
    ids=["long chunk", "long steps", "short chunk"],
)
def test_after_a_chunk_of_a_prompt_texts_do_not_wait_as_long_again_for_draft_models(
    plain_s: float, chunk_s: float, reading_s: float
):
    clock = FakeClock()
    residents = Residents([resident(Endless(clock), clock=clock)], clock)
    residents.draft([], StepReport(step_time_s=plain_s))
    drafted = residents.draft(
        [resident_text()], StepReport(step_time_s=chunk_s, num_prefill_tokens=64)
    )
    assert drafted.time_s == pytest.approx(reading_s, abs=0.003)


class Lavish(GreedyOracle):
    """Drafts four nodes for each that it is asked for."""

    def _proposal(self, task: DraftTask) -> Proposal:
        return super()._proposal(replace(task, max_nodes=4 * task.max_nodes))


def test_no_tree_has_more_nodes_than_were_asked_for():
    (proposal,) = drafted(
        resident(Lavish(16), clock=FakeClock()), resident_text(draft_nodes=3), now=1000.0
    )
    assert proposal.tree.parents.tolist() == [-1, 0, 1]
    assert len(proposal.survival) == 3


class Forgetful(GreedyOracle):
    """Keeps no text beyond four tokens, and says so."""

    def _observe(self, commit: Commit) -> Observation:
        super()._observe(commit)
        state = self._requests.get(commit.request_id, commit.generation)
        if state is None:
            return self._requests.declined(commit)
        state.text.truncate(4)
        return Observation(commit.request_id, commit.generation, len(state.text))


def test_one_that_keeps_less_than_it_is_sent_is_sent_the_rest_once():
    forgetful = Forgetful()
    drafter = resident(forgetful, clock=FakeClock())
    assert drafted(drafter, resident_text(range(9)), now=1000.0) == []
    assert [(each.base_len, len(each.token_ids)) for each in forgetful.commits] == [(0, 9), (4, 5)]
    assert forgetful.released == ["r"]  # and then it is left alone with it
    assert drafted(drafter, resident_text(range(9)), now=1000.0) == []
    assert len(forgetful.commits) == 2


class Stalling(GreedyOracle):
    """Takes a second for its third tree."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__(2)
        self.clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        if len(self.tasks) == 2:
            self.clock.now += 1.0
        return super().propose(tasks)


async def test_a_stall_is_counted_and_the_text_goes_on_without_its_drafter():
    clock = FakeClock()
    residents = [resident(Stalling(clock), clock=clock)]
    async with steps(residents=residents, clock=clock) as target:
        assert await texts_of(target, [GREEDY]) == [plain()]
        assert faults_of(target) == {"stalled": 1.0}


class BrokenClock(FakeClock):
    is_broken = False

    def __call__(self) -> float:
        if self.is_broken:
            raise OSError("no clock")
        return super().__call__()


async def test_a_defect_in_drafting_itself_costs_the_others_nothing():
    clock = BrokenClock()
    broken, sound = resident(GreedyOracle(2, "b"), "b", clock), resident(GreedyOracle(3))
    clock.is_broken = True
    desk = await written(opened(drafters=("a", "b")), residents=[broken, sound])
    clock.is_broken = False
    assert desk.text() == plain()
    assert [len(verdict.sources) for verdict in desk.verdicts["r"][1:4]] == [3, 3, 3]


# Good drafters draft from the first answer, whatever raises, lies or sleeps beside them.


STEP_S = 0.01


class TimedEngine(ToyEngine):
    """Its steps take as long as those of a small model."""

    def __init__(self, clock: FakeClock) -> None:
        super().__init__()
        self._clock = clock

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        outputs = super().step(taps)
        self._clock.now += STEP_S + 0.0002 * self.last_step.num_nodes
        return outputs


class Timed(GreedyOracle):
    """A look-up that takes next to no time."""

    is_look_up = True

    def __init__(self, clock: FakeClock, name: str) -> None:
        super().__init__(name=name)
        self._clock = clock

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.0001
        return super().propose(tasks)


class Raising(Timed):
    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        raise ValueError("what the prompt says")


class Foreign(Timed):
    def _proposal(self, task: DraftTask) -> Proposal:
        return WRONG["a vocabulary of its own"](super()._proposal(task))


class Sleeping(Timed):
    """Takes much longer than any step whenever it is asked."""

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.5
        return []


class SleepingModel(Sleeping):
    is_look_up = False


class RaisingModel(Raising):
    is_look_up = False


BAD = {
    "nobody": [],
    "raising": [Raising],
    "lying": [Foreign],
    "sleeping": [Sleeping],
    "models": [RaisingModel, SleepingModel],
    "all": [RaisingModel, Foreign, SleepingModel, Sleeping],
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_good_drafter_drafts_from_the_first_answer(bad: list[type[Timed]]):
    clock = FakeClock()
    drafters = {"good": Timed(clock, "good")}
    drafters |= {kind.__name__: kind(clock, kind.__name__) for kind in bad}
    residents = [resident(each, name, clock) for name, each in drafters.items()]
    async with desk_of(
        engine=TimedEngine(clock), residents=residents, clock=clock, budget="adaptive"
    ) as desk:
        for index in range(6):
            name = f"r{index}"
            desk.post(opened(name, drafters=tuple(drafters)))
            await desk.run()
            assert desk.text(name) == plain()
            accepted = [bits for each in desk.verdicts[name] for bits in each.sources.tolist()]
            assert any(bits & 1 for bits in accepted), f"answer {index}"
            clock.now += 60.0  # whoever rests has rested


async def test_a_step_that_answers_only_some_of_its_texts_lowers_no_trust_in_drafts():
    clock = FakeClock()
    engine, residents = TimedEngine(clock), [resident(Timed(clock, "a"), clock=clock)]
    opens = [opened(name, drafters=("a",)) for name in "abcdefghijkl"]
    async with desk_of(
        *opens, engine=engine, residents=residents, clock=clock, budget="adaptive"
    ) as desk:
        for _ in range(5):
            await desk.turn()
        engine.works_per_step = 9
        await desk.run()
        assert desk.target.controller.target.arms[False][False].trust == 1.0
