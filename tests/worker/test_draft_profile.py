"""What a target says of its residents before it serves."""

import itertools
from collections.abc import Sequence

import pytest

from cluster import metrics
from cluster.core import Commit, Observation, Proposal, SamplingParams, token_array
from cluster.draft.base import Drafter, DraftTask
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
from tests.worker.test_resident_faults import Broken


class Timed(GreedyOracle):
    """Takes 0.1 ms per node and text, and as long per ten tokens that it reads."""

    def __init__(self, clock: FakeClock, *, is_look_up: bool = False) -> None:
        super().__init__(length=32)
        self._clock = clock
        self.is_look_up = is_look_up

    def observe(self, commits: Sequence[Commit]) -> Sequence[Observation]:
        self._clock.now += 0.00001 * sum(len(commit.token_ids) for commit in commits)
        return super().observe(commits)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self._clock.now += 0.0001 * sum(task.max_nodes for task in tasks)
        return super().propose(tasks)


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


def test_each_resident_is_timed_alone_by_texts_and_nodes_and_models_read_by_themselves():
    clock = FakeClock(0.0)
    look_ups, models = [Timed(clock, is_look_up=True) for _ in range(2)], [Timed(clock)] * 2
    found = profile([*look_ups, *models], clock, max_sequences=8)
    times = {
        (each.drafter, each.num_sequences, each.num_nodes): each
        for each in found
        if not each.num_read
    }
    assert times.keys() == {*itertools.product(("d0", "d1", "d2", "d3"), (1, 4), (2, 8, 24))}
    for (name, count, nodes), each in times.items():
        assert each.is_look_up == (name in ("d0", "d1"))
        assert each.time_s == pytest.approx(count * (0.0001 * nodes + 0.00001), rel=0.2)
    readings = {each.drafter: each for each in found if each.num_read}
    assert readings.keys() == {"d2", "d3"}
    for each in readings.values():
        assert each.num_read == each.num_sequences == 1
        drafting_s = times[each.drafter, 1, each.num_nodes].time_s
        assert each.time_s - drafting_s == pytest.approx(0.00128, rel=0.2)
    told = {commit.request_id for commit in models[0].commits}
    assert told == set(models[0].released)
    assert {commit.tenant for commit in models[0].commits} >= {b"draft-profile"}


def test_it_ends_soon_where_drafting_takes_long():
    clock = FakeClock(0.0)

    class Slow(Timed):
        def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
            self._clock.now += 3.0
            return super().propose(tasks)

    profile([Slow(clock)], clock)
    assert clock.now < 10.0


def test_faults_before_anyone_is_served_keep_no_drafter_from_its_first_request():
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
    asked = len(broken.commits)
    assert hosted.draft([text], 1.0, clock.now + 1.0) == ([], False)
    assert len(broken.commits) == asked + 1
