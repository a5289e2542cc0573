"""Waiting for drafts is bought like drafts: where it pays, and not a moment longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.core import EMPTY_FLOATS
from cluster.spec.arrivals import GRID_S, NUM_RANKS, WAITS_S, ArrivalTable, Floats, profile
from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, Decision, SequenceDraft, Share
from cluster.spec.goodput import GoodputModel
from cluster.spec.step_times import bucket
from cluster.spec.waits import WaitTrials

RULES = BudgetRules(max_draft_tokens=8)


def controller(step_s: float, num_sequences: int = 1, cost: float = 0.0) -> BudgetController:
    """One that knows its step times; `cost`: of 8 nodes, relative to a plain step."""
    budget = BudgetController(RULES, WAITS_S)
    for num_nodes in (0, 8):
        for _ in range(6):
            time_s = step_s * (1.0 + cost * num_nodes / 8)
            budget.record(num_sequences, num_nodes, time_s)
            if num_nodes == 0:
                budget.settle([Share(0, 1)] * num_sequences, time_s)
    return budget


def promise(tokens: float, after_s: float) -> Floats:
    """So many tokens' worth of drafts from after_s on, spread over four ranks."""
    arriving = np.zeros((len(WAITS_S), NUM_RANKS))
    for index, wait_s in enumerate(WAITS_S):
        arriving[index, :4] = tokens / 4 if wait_s >= after_s else 0.0
    return arriving


def nothing_yet(tokens: float, after_s: float) -> SequenceDraft:
    return SequenceDraft(EMPTY_FLOATS, arriving=promise(tokens, after_s))


def test_two_milliseconds_that_bring_two_tokens_are_waited_for() -> None:
    decision = controller(0.020).choose([nothing_yet(2.0, 0.002)], max_wait_s=0.008)

    assert decision == Decision([], 0.004, (0,)), "a little patience included"


@pytest.mark.parametrize(
    ("tokens", "after_s", "max_wait_s", "step_s"),
    [(2.0, 0.002, 0.001, 0.020), (0.2, 0.008, 0.008, 0.020), (2.0, 0.004, 0.008, 0.001)],
    ids=["beyond the bound", "too little", "too slow for so fast a target"],
)
def test_a_wait_that_does_not_pay_is_not_made(
    tokens: float, after_s: float, max_wait_s: float, step_s: float
) -> None:
    decision = controller(step_s).choose([nothing_yet(tokens, after_s)], max_wait_s)

    assert decision.wait_s == 0.0
    assert [len(nodes) for nodes in decision.nodes] == [0]


def test_one_sequence_does_not_hold_up_a_batch_that_has_its_drafts() -> None:
    ready = SequenceDraft(np.array([0.9, 0.8, 0.7], np.float32))
    budget = controller(0.010, num_sequences=8)

    assert budget.choose([*[ready] * 7, nothing_yet(0.5, 0.008)], 0.008).wait_s == 0.0


def test_a_deeper_tree_is_waited_for_where_the_first_level_is_there() -> None:
    at_hand = np.array([0.9], np.float32)
    arriving = np.zeros((len(WAITS_S), NUM_RANKS))
    arriving[:, :4] = [0.9, 0.8, 0.7, 0.6]

    decision = controller(0.030).choose([SequenceDraft(at_hand, arriving=arriving)], 0.004)

    assert decision.wait_s == 2 * WAITS_S[0]


def test_the_guard_covers_waits() -> None:
    budget = controller(0.020)
    budget.settle([Share(8, 1)], 0.020 * 9.5)

    assert budget.choose([nothing_yet(2.0, 0.002)], 0.008).wait_s == 0.0


def growth_of(table: ArrivalTable, *, hit: bool, since_s: float) -> Floats:
    """What is expected of a session that has nothing yet."""
    return table.expected(hit=hit, since_s=since_s, at_hand=np.zeros(NUM_RANKS))


def test_the_table_learns_what_comes_when() -> None:
    table = ArrivalTable()
    for _ in range(5):
        trees = [(0.0015, np.array([0.8], np.float32)), (0.003, np.array([0.8, 0.6], np.float32))]
        table.observe(hit=False, elapsed_s=0.010, trees=trees)

    growth = growth_of(table, hit=False, since_s=0.0).sum(axis=1)

    expected = dict.fromkeys(WAITS_S, 1.4) | {0.001: 0.0, 0.002: 0.8}
    assert dict(zip(WAITS_S, growth.tolist(), strict=True)) == pytest.approx(expected)
    assert not growth_of(table, hit=True, since_s=0.0).any()
    assert growth_of(table, hit=False, since_s=0.002)[1].sum() > 0.5
    assert not growth_of(table, hit=False, since_s=GRID_S[-1]).any()


def test_promises_that_are_broken_lose_their_worth() -> None:
    table = ArrivalTable()
    table.observe(hit=False, elapsed_s=0.02, trees=[(0.001, np.array([0.9], np.float32))])
    before = growth_of(table, hit=False, since_s=0.0).max()

    for _ in range(100):
        table.observe(hit=False, elapsed_s=0.02, trees=[])

    assert before == pytest.approx(0.9)
    assert growth_of(table, hit=False, since_s=0.0).max() < 0.1


def test_what_a_commit_cut_short_is_not_taken_for_nothing() -> None:
    table = ArrivalTable()
    table.observe(hit=False, elapsed_s=0.02, trees=[(0.003, np.array([0.9], np.float32))])
    for _ in range(50):
        table.observe(hit=False, elapsed_s=0.002, trees=[])

    assert growth_of(table, hit=False, since_s=0.0)[WAITS_S.index(0.004)].max() == pytest.approx(
        0.9
    )


def test_what_has_come_early_is_not_expected_again() -> None:
    table, tree = ArrivalTable(), np.array([0.9, 0.8], dtype=np.float32)
    for _ in range(20):
        table.observe(hit=False, elapsed_s=0.01, trees=[(0.0019, tree)])
    assert growth_of(table, hit=False, since_s=0.001).max() == pytest.approx(0.9)
    at_hand = profile(tree)
    later = table.expected(hit=False, since_s=0.001, at_hand=at_hand)
    np.testing.assert_allclose(later, np.tile(at_hand, (len(WAITS_S), 1)), atol=1e-6)


def test_what_comes_while_the_target_is_idle_is_what_a_wait_brings() -> None:
    """Beside a working target it takes 12 ms, during a wait 3: only the latter is waited for."""
    table, tree = ArrivalTable(), np.array([0.9], dtype=np.float32)
    for _ in range(30):
        table.observe(hit=False, elapsed_s=0.03, trees=[(0.011, tree)], idle_s=0.0015)
    assert not growth_of(table, hit=False, since_s=0.0)[WAITS_S.index(0.004)].any()

    # The wait ended when the tree came: by the next mark there would be that.
    table.observe(hit=False, elapsed_s=0.03, trees=[(0.003, tree)], idle_s=0.003)
    growth = growth_of(table, hit=False, since_s=0.0).max(axis=1)
    assert growth[WAITS_S.index(0.002)] == 0.0
    assert growth[WAITS_S.index(0.004)] == pytest.approx(0.9)

    # One that brought nothing says so of all the time it took.
    for _ in range(100):
        table.observe(hit=False, elapsed_s=0.03, trees=[], idle_s=0.009)
    assert growth_of(table, hit=False, since_s=0.0)[WAITS_S.index(0.008)].max() < 0.1


@pytest.mark.parametrize(("num_sequences", "first"), [(1, 4), (4, 8), (16, 16)])
def test_a_trial_comes_the_later_the_more_sequences_sit_it_out(
    num_sequences: int, first: int
) -> None:
    budget = controller(0.020, num_sequences)
    found = [budget.trial_s(num_sequences, max_wait_s=1.0) for _ in range(first)]
    assert found == pytest.approx([0.0] * (first - 1) + [0.010])


def test_trials_become_rare_until_a_wait_pays() -> None:
    trials = WaitTrials()

    def gaps(count: int) -> list[int]:
        found, gap = [], 0
        while len(found) < count:
            gap += 1
            if trials.is_due(1):
                found.append(gap)
                gap = 0
                assert [trials.is_due(1) for _ in range(3)] == [True] * 3  # it goes on
        return found

    assert gaps(8) == [4, 8, 16, 32, 64, 128, 256, 256]
    trials.paid(1)
    assert gaps(3) == [256, 8, 16]
    assert [trials.is_due(16) for _ in range(17)] == [False] * 15 + [True, False]


@pytest.mark.parametrize(("num_sequences", "rounds"), [(1, 4), (4, 4), (8, 2), (16, 1), (64, 1)])
def test_a_trial_is_as_many_rounds_as_it_takes_to_see_sixteen_commits(
    num_sequences: int, rounds: int
) -> None:
    trials = WaitTrials()
    while not trials.is_due(num_sequences):
        continue
    assert [trials.is_due(num_sequences) for _ in range(rounds)] == [True] * (rounds - 1) + [False]


def test_a_wait_that_is_bought_ends_a_trial_under_way() -> None:
    trials = WaitTrials()
    while not trials.is_due(1):
        continue
    trials.paid(1)
    assert not trials.is_due(1), "what was to be found out is known"


@given(
    seed=st.integers(0, 10**6),
    num_sequences=st.sampled_from([1, 3, 40]),
    measured=st.lists(st.sampled_from([1, 4, 8, 32, 128]), unique=True),
)
def test_the_best_after_each_wait_is_that_of_the_whole_list(
    seed: int, num_sequences: int, measured: list[int]
) -> None:
    generator = np.random.default_rng(seed)
    model = GoodputModel(BudgetRules(max_draft_tokens=8))
    for num_nodes in (0, *measured):
        for _ in range(3):
            model.times.record(num_sequences, num_nodes, 0.01 + 0.0002 * num_nodes)
    gains = -np.sort(-generator.random((len(WAITS_S), int(generator.integers(0, 200)))), axis=1)
    for row in gains:
        row[int(generator.integers(0, len(row) + 1)) :] = 0.0

    counts, goodputs = model.best_later(num_sequences, num_sequences, gains, WAITS_S)

    for row, wait_s, count, goodput in zip(gains, WAITS_S, counts, goodputs, strict=True):
        expected = model.goodputs(num_sequences, num_sequences, row[row > 0.0], wait_s)
        assert goodput == pytest.approx(max(expected.values()))
        best = min(n for n in expected if expected[n] == max(expected.values()))
        assert count == bucket(best)
