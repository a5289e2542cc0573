"""Drafters are asked for what is used of them, and for next to nothing where nothing is."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from cluster.spec.demand import (
    APART_NODES,
    MAX_LAG,
    MIN_NODES,
    PROBE_NODES,
    Demand,
    DemandBook,
    Place,
    Used,
    demand_apart,
)
from cluster.spec.patience import Mode

LIMIT = 48


@dataclass
class Batch:
    """Sessions at one target that commit in turn; `uses`: nodes taken of one that has drafts.

    accepts: whether one of these is accepted.  delay: rounds until a drafter that is asked has a
    tree to offer.
    """

    num_sequences: int
    uses: Callable[[str], int] = lambda session_id: 0
    delay: int = 1
    accepts: bool = True
    book: DemandBook = field(default_factory=DemandBook)
    task: str = "code"
    is_cheap: bool = False
    names: list[str] = field(default_factory=list)
    rounds: list[list[Demand]] = field(default_factory=list)
    _asked_for: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.resize(self.num_sequences)

    def resize(self, num_sequences: int) -> None:
        for name in self.names[num_sequences:]:
            self.book.release(name)
        fresh = [f"s{len(self.names) + index}" for index in range(num_sequences - len(self.names))]
        self.num_sequences, self.names = num_sequences, [*self.names, *fresh][:num_sequences]
        for name in fresh:
            self.decide(name, None)

    def restart(self) -> None:
        """All sessions end, and others of the same task begin."""
        names, self.names = self.names, []
        for name in names:
            self.book.release(name)
        self._asked_for.clear()
        self.resize(len(names))

    def decide(self, name: str, num_taken: int | None) -> Demand:
        place = Place("t", self.task, self.num_sequences)
        used = None
        if num_taken is not None:
            used = Used(num_taken, int(self.accepts and num_taken > 0))
        demand = self.book.decide(name, "lm", place, used, LIMIT, is_cheap=self.is_cheap)
        self._asked_for[name] = self._asked_for.get(name, 0) + 1 if demand.max_nodes else 0
        return demand

    def run(self, num_rounds: int) -> list[list[Demand]]:
        first = len(self.rounds)
        for _ in range(num_rounds):
            demands = []
            for name in self.names:
                has_tree = self._asked_for.get(name, 0) >= self.delay
                if has_tree:
                    self.book.offered(name, "lm")
                demands.append(self.decide(name, self.uses(name) if has_tree else 0))
            self.rounds.append(demands)
        return self.rounds[first:]


def share_asked(rounds: list[list[Demand]]) -> float:
    return sum(each.max_nodes > 0 for row in rounds for each in row) / sum(map(len, rounds))


@pytest.mark.parametrize(("used", "asked"), [(1, MIN_NODES), (3, 6), (10, 20), (40, LIMIT)])
def test_a_drafter_that_is_used_is_asked_for_twice_as_much(used: int, asked: int) -> None:
    batch = Batch(4, uses=lambda name: used)
    batch.run(3)
    assert {demand for row in batch.run(40) for demand in row} == {Demand(Mode.GROWING, asked)}


def test_nobody_knows_at_first_so_all_is_asked_for() -> None:
    batch = Batch(1)
    assert batch.run(1)[0] == [Demand(Mode.GROWING, LIMIT)]


@pytest.mark.parametrize(
    ("num_sequences", "asked"), [(1, 48), (2, 24), (4, 12), (5, 6), (16, 4), (64, 4)]
)
def test_of_many_each_is_asked_for_its_share_at_first(num_sequences: int, asked: int) -> None:
    demand = DemandBook().decide("s", "a", Place("t", "code", num_sequences), None, LIMIT)
    assert demand == Demand(Mode.GROWING, asked)


def test_what_was_taken_fades_slowly() -> None:
    used = 8
    batch = Batch(1, uses=lambda name: used)
    batch.run(5)
    used = 1
    asked = [row[0].max_nodes for row in batch.run(40)]
    assert asked[0] >= 14
    assert asked == sorted(asked, reverse=True)
    assert asked[-1] == MIN_NODES


@pytest.mark.parametrize("num_sequences", [1, 4, 16, 32])
def test_a_drafter_that_is_never_used_is_soon_asked_for_next_to_nothing(num_sequences: int) -> None:
    batch = Batch(num_sequences)
    rounds = batch.run(1200)
    parked_at = next(i for i, row in enumerate(rounds) if row[0].mode is Mode.PARKED)
    assert parked_at <= 17
    assert share_asked(rounds[100:]) < 0.12
    assert share_asked(rounds[-500:]) < 0.04
    assert all(any(each.max_nodes for row in rounds[i : i + 600] for each in row) for i in (1, 600))


def test_most_of_a_large_batch_does_not_probe_at_the_same_time() -> None:
    batch = Batch(32)
    rounds = batch.run(600)
    crowd = [sum(each.mode is Mode.PROBING for each in row) for row in rounds]
    assert 4 <= max(crowd[60:]) <= 8


def test_a_slow_first_tree_is_waited_for_longer_than_a_refused_one() -> None:
    batch = Batch(1, uses=lambda name: 3, delay=50)
    assert all(row[0].mode is Mode.GROWING for row in batch.run(60))


def test_a_drafter_that_never_answers_is_parked_all_the_same() -> None:
    batch = Batch(1, delay=10_000)
    rounds = batch.run(3000)
    assert rounds[70][0].mode is Mode.PARKED
    assert share_asked(rounds[500:]) < 0.06


def test_nodes_that_are_only_measured_with_do_not_keep_a_drafter_busy() -> None:
    rounds = iter(range(10_000))
    batch = Batch(1, uses=lambda name: 6 * (next(rounds) % 2), accepts=False)
    assert batch.run(100)[40][0].mode is Mode.PARKED
    assert share_asked(batch.run(1000)) < 0.06


def test_one_lucky_step_of_a_probe_does_not_set_a_whole_batch_drafting() -> None:
    used = 0
    batch = Batch(32, uses=lambda name: used)
    batch.run(300)
    while all(each.mode is Mode.PARKED for each in batch.run(1)[0]):
        continue
    batch.run(1)
    name = batch.names[[each.mode for each in batch.rounds[-1]].index(Mode.PROBING)]
    batch.decide(name, 6)
    assert share_asked(batch.run(10)) < 0.3


@pytest.mark.parametrize(("every", "is_kept"), [(7, True), (81, False)])
def test_drafts_that_are_seldom_of_use_are_not_drafted_for_everybody(
    every: int, is_kept: bool
) -> None:
    commits = itertools.count()
    batch = Batch(32, uses=lambda name: int(next(commits) % every == 0))
    assert (share_asked(batch.run(400)[200:]) > 0.5) is is_kept


def test_a_group_that_wakes_in_vain_sleeps_longer_each_time() -> None:
    """Lucky for a few rounds now and then: hardly more is drafted than for one that never is."""
    rounds = itertools.count()
    batch = Batch(32)
    batch.uses = lambda name: int(next(rounds) % 640 < 24)
    assert share_asked(batch.run(1500)[500:]) < 0.12


def test_unlucky_drafts_are_given_a_second_chance() -> None:
    batch = Batch(1, uses=lambda name: 2, accepts=False)
    assert all(row[0].mode is Mode.GROWING for row in batch.run(60))


@pytest.mark.parametrize("num_sequences", [1, 32])
def test_a_probe_that_is_used_ends_the_pause_for_everybody(num_sequences: int) -> None:
    used = 0
    batch = Batch(num_sequences, uses=lambda name: used)
    batch.run(400)
    used = 4
    rounds = batch.run(700)
    assert all(demand == Demand(Mode.GROWING, 8) for row in rounds[-100:] for demand in row)


def test_new_sessions_of_a_parked_task_begin_parked_and_of_another_with_drafts() -> None:
    batch = Batch(4)
    batch.run(200)
    batch.restart()
    assert share_asked(batch.run(4)) <= 0.25
    other = Batch(4, book=batch.book, task="prose")
    assert share_asked(other.run(1)) == 1.0


def test_when_the_load_falls_a_parked_drafter_is_tried_at_once() -> None:
    batch = Batch(2)
    batch.run(200)
    batch.resize(32)
    batch.uses = lambda name: 5 if batch.num_sequences <= 4 else 0
    batch.run(300)
    for num_sequences in (4, 2):
        batch.resize(num_sequences)
        rounds = batch.run(4)
        assert any(each.max_nodes >= PROBE_NODES for row in rounds for each in row)
        batch.run(num_rounds=30)
        assert all(each.mode is Mode.GROWING for each in batch.run(1)[0])


def test_when_the_load_rises_what_did_not_pay_before_is_not_begun_anew() -> None:
    batch = Batch(2)
    batch.run(200)
    batch.resize(8)
    assert share_asked(batch.run(3)) < 0.3


def test_a_load_that_wavers_does_not_keep_useless_drafters_busy() -> None:
    batch = Batch(17)
    batch.run(200)
    rounds: list[list[Demand]] = []
    for _ in range(20):
        for num_sequences in (16, 17):
            batch.resize(num_sequences)
            rounds += batch.run(10)
    assert share_asked(rounds) < 0.15


def test_one_text_that_suits_no_drafter_does_not_cost_the_others_theirs() -> None:
    batch = Batch(8, uses=lambda name: 0 if name == "s0" else 4)
    rounds = batch.run(400)
    last = [[row[index] for row in rounds[-150:]] for index in range(8)]
    assert share_asked([last[0]]) < 0.1
    assert all(each.mode is Mode.GROWING for column in last[1:] for each in column)


def test_a_cheap_drafter_is_given_more_patience_and_shorter_pauses() -> None:
    dear, cheap = Batch(1), Batch(1, is_cheap=True)
    for batch in (dear, cheap):
        batch.run(2000)
    parked_after = [
        1 + next(i for i, row in enumerate(each.rounds) if row[0].mode is Mode.PARKED)
        for each in (dear, cheap)
    ]
    assert parked_after == [16, 32]
    assert share_asked(dear.rounds[-1000:]) < 0.03
    assert 0.05 < share_asked(cheap.rounds[-1000:]) < 0.15


def test_a_parked_drafter_hears_at_once_that_it_is_and_of_the_text_now_and_then() -> None:
    batch = Batch(1)
    rounds = [row[0] for row in batch.run(300)]
    parked_at = next(i for i, each in enumerate(rounds) if each.mode is Mode.PARKED)
    assert rounds[parked_at].is_told
    told = [index for index, each in enumerate(rounds) if each.is_told]
    lags = [later - sooner for sooner, later in itertools.pairwise(told)]
    assert max(lags) == MAX_LAG
    assert all(each.is_told for each in rounds if each.max_nodes)


def test_a_new_text_in_a_parked_group_is_told_when_it_has_become_longer() -> None:
    """Its prompt would have to be read; eight tokens later it may be over."""
    batch = Batch(8)
    batch.run(30)
    found = [batch.book.decide("new", "lm", Place("t", "code", 8), None, LIMIT)
             for _ in range(2 * MAX_LAG)]  # fmt: skip
    assert {demand.mode for demand in found} == {Mode.PARKED}
    told = [index for index, demand in enumerate(found) if demand.is_told]
    assert told == [MAX_LAG - 1, 2 * MAX_LAG - 1]


def test_a_new_drafter_of_the_same_name_begins_anew() -> None:
    batch = Batch(2)
    batch.run(100)
    batch.book.forget("lm")
    assert share_asked(batch.run(1)) == 1.0


def test_a_commit_without_a_step_uses_no_patience() -> None:
    batch = Batch(1)
    batch.book.offered("s0", "lm")
    for _ in range(100):
        assert batch.decide("s0", None).mode is Mode.GROWING


@pytest.mark.parametrize(("num_sequences", "asked"), [(1, APART_NODES), (8, 64), (32, 16)])
def test_on_devices_of_its_own_a_model_grows_broad_trees_within_what_the_coordinator_reads(
    num_sequences: int, asked: int
) -> None:
    place = Place("t", "code", num_sequences)
    assert demand_apart(place, LIMIT, is_broad=True) == Demand(Mode.GROWING, asked)


@pytest.mark.parametrize("is_broad", [True, False])
@pytest.mark.parametrize("limit", [1, 3, LIMIT])
def test_on_devices_of_its_own_a_drafter_is_always_asked_for_some(
    limit: int, is_broad: bool
) -> None:
    for num_sequences in (1, 2, 64, 256, 100_000):
        demand = demand_apart(Place("t", "code", num_sequences), limit, is_broad=is_broad)
        assert demand.mode is Mode.GROWING
        assert demand.max_nodes >= min(limit, 4)
