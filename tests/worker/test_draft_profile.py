"""What a target says of its residents before it serves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cluster import metrics
from cluster.core import Commit, DraftTask, Observation, Proposal, SamplingParams, token_array
from cluster.draft.base import Drafter
from cluster.metrics.recorder import Recorder
from cluster.spec.budget import Ask
from cluster.spec.step_profile import DraftTime
from cluster.worker.draft_profile import profile_drafting
from cluster.worker.residents import Residents
from cluster.worker.texts import measured_text
from cluster.worker.verifier import Verifier
from tests.support.clock import FakeClock
from tests.support.worker.residents import GreedyOracle, resident
from tests.support.worker.steps import recorded
from tests.support.worker.texts import VOCAB_SIZE
from tests.support.worker.toy_engine import ToyEngine


class Timed(GreedyOracle):
    """Takes a millisecond per node and text, and one per ten tokens that it reads."""

    def __init__(self, clock: FakeClock, *, is_look_up: bool = False) -> None:
        super().__init__(length=32)
        self._clock = clock
        self.is_look_up = is_look_up

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self._clock.now += 0.0001 * sum(len(commit.token_ids) for commit in commits)
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.001 * sum(task.max_nodes for task in tasks)
        return super().propose(tasks)


class Broken(GreedyOracle):
    num_asked = 0

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.num_asked += 1
        raise RuntimeError("broken")


def profile(
    drafters: Sequence[Drafter], clock: FakeClock, max_sequences: int = 16
) -> tuple[DraftTime, ...]:
    engine = ToyEngine()
    residents = Residents(
        [resident(each, f"d{i}", clock) for i, each in enumerate(drafters)], clock
    )
    verifier = Verifier(engine, clock, wants=residents.wants)
    found = profile_drafting(verifier, residents, VOCAB_SIZE, max_sequences, clock)
    assert not verifier.has_pending
    assert engine.pages_in_use == 0
    return found


def test_it_times_drafting_by_texts_and_nodes_and_reading_by_itself() -> None:
    clock = FakeClock(0.0)
    found = profile([Timed(clock)], clock, max_sequences=8)
    times = {(each.num_sequences, each.num_nodes): each for each in found if not each.num_read}
    assert times.keys() == {(count, nodes) for count in (1, 4) for nodes in (2, 8, 24)}
    for (count, nodes), each in times.items():
        assert (each.drafter, each.is_look_up) == ("d0", False)
        assert each.time_s == pytest.approx(count * (0.001 * nodes + 0.0001), rel=0.2)
    (reading,) = (each for each in found if each.num_read)
    assert reading.num_read == reading.num_sequences == 1
    assert reading.time_s - times[1, reading.num_nodes].time_s == pytest.approx(0.0128, rel=0.2)


def test_each_resident_is_timed_by_itself() -> None:
    clock = FakeClock(0.0)
    look_ups, models = [Timed(clock, is_look_up=True) for _ in range(2)], [Timed(clock)] * 2
    found = profile([*look_ups, *models], clock, max_sequences=1)
    times = {(each.drafter, each.num_nodes): each.time_s for each in found if not each.num_read}
    for name in ("d0", "d1", "d2", "d3"):
        for nodes in (2, 8, 24):
            assert times[name, nodes] == pytest.approx(0.001 * nodes + 0.0001, rel=0.2)
    assert {each.drafter for each in found if each.num_read} == {"d2", "d3"}
    assert {each.drafter for each in found if each.is_look_up} == {"d0", "d1"}


def test_residents_forget_the_texts_that_they_were_timed_on() -> None:
    clock = FakeClock(0.0)
    model = Timed(clock)
    profile([model], clock)
    told = {commit.request_id for commit in model.commits}
    assert told == set(model.released)
    assert {commit.tenant for commit in model.commits} >= {b"draft-profile"}


def test_it_ends_soon_where_drafting_takes_long() -> None:
    clock = FakeClock(0.0)

    class Slow(Timed):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
            self._clock.now += 3.0
            return super().propose(tasks)

    profile([Slow(clock)], clock)
    assert clock.now < 10.0


def test_faults_before_anyone_is_served_keep_no_drafter_from_its_first_request() -> None:
    clock = FakeClock(0.0)
    broken = Broken()
    hosted = resident(broken, "broken", clock)
    engine = ToyEngine()
    residents = Residents([hosted], clock)
    profile_drafting(Verifier(engine, clock), residents, VOCAB_SIZE, 16, clock)
    recorder = Recorder()
    for each in residents:
        each.record(recorder, "w")
    assert (
        recorded(recorder, metrics.DRAFT_TIME) == recorded(recorder, metrics.DRAFTER_FAULTS) == {}
    )
    text = measured_text("r", token_array([1, 2, 3]), SamplingParams(), ["broken"])
    text.ask = Ask(4)
    asked = broken.num_asked
    assert hosted.draft([text], 1.0, clock.now + 1.0) == ([], False)
    assert broken.num_asked == asked + 1
