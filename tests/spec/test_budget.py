"""The controller buys drafts only where they pay, by its own measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.core import EMPTY_FLOATS, TokenTree
from cluster.spec.budget import BudgetController
from cluster.spec.drafts import BudgetRules, SequenceDraft, marginal_gains
from cluster.spec.step_times import EDGES, StepTimes, bucket
from cluster.spec.tree import monotone
from tests.support.spec.trees import token_trees

StepTime = Callable[[int, int], float]


def geometric(num_nodes: int, rate: float = 0.8) -> SequenceDraft:
    """A chain whose nodes survive with rate, rate^2, ..."""
    return SequenceDraft(np.float32(rate) ** np.arange(1, num_nodes + 1, dtype=np.float32))


def run(
    controller: BudgetController,
    step_time: StepTime,
    drafts: list[SequenceDraft],
    num_steps: int,
) -> list[int]:
    """Steps against a simulated target; the number of nodes of each."""
    counts = []
    for _ in range(num_steps):
        num_nodes = sum(len(nodes) for nodes in controller.choose(drafts).nodes)
        controller.record(len(drafts), num_nodes, step_time(len(drafts), num_nodes))
        counts.append(num_nodes)
    return counts


def free_drafts(num_sequences: int, num_nodes: int) -> float:
    return 0.010


def costly_drafts(num_sequences: int, num_nodes: int) -> float:
    return 0.010 * (1 + num_nodes)


@pytest.fixture
def warm() -> BudgetController:
    """A controller that knows that drafts are free, for batches of 1 to 4."""
    controller = BudgetController(BudgetRules(max_draft_tokens=16))
    for num_sequences in (1, 2, 3, 4):
        run(controller, free_drafts, [geometric(16)] * num_sequences, 60)
    return controller


@given(
    st.lists(
        st.tuples(
            token_trees(), st.integers(0, 99), st.floats(0.1, 5), st.none() | st.integers(0, 9)
        ),
        min_size=1,
        max_size=4,
    ),
    st.integers(0, 8),
)
@settings(deadline=None, max_examples=60)
def test_choices_respect_caps_and_are_closed_under_parents(
    sequences: list[tuple[TokenTree, int, float, int | None]], cap: int
) -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=cap, max_step_nodes=10))
    drafts = []
    for tree, seed, weight, own_cap in sequences:
        values = np.random.default_rng(seed).random(len(tree)).astype(np.float32)
        drafts.append(SequenceDraft(monotone(tree.parents, values), weight, own_cap))
    for _ in range(4):
        controller.record(len(drafts), 0, 0.01)

    for _ in range(6):
        chosen = controller.choose(drafts).nodes
        assert sum(len(nodes) for nodes in chosen) <= 10
        for nodes, (tree, _, _, own_cap) in zip(chosen, sequences, strict=True):
            assert len(nodes) <= min(cap, cap if own_cap is None else own_cap)
            assert nodes.tolist() == sorted(set(nodes.tolist()))
            assert all(int(tree.parents[node]) in (-1, *nodes.tolist()) for node in nodes)
        controller.record(len(drafts), sum(len(nodes) for nodes in chosen), 0.01)


def test_free_drafts_are_all_bought(warm: BudgetController) -> None:
    assert run(warm, free_drafts, [geometric(16)], 10) == [16] * 10


def test_drafts_that_cost_more_than_they_give_are_left(
    warm: BudgetController,
) -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    counts = run(controller, costly_drafts, [geometric(16)], 400)

    assert np.mean(np.array(counts[100:]) == 0) > 0.95


def test_the_staircase_is_found_and_its_edge_used() -> None:
    """Up to 8 rows a step costs the same, then it doubles: 8 nodes are the best buy."""
    controller = BudgetController(BudgetRules(max_draft_tokens=32))

    counts = run(controller, lambda b, n: 0.010 if n <= 8 else 0.025, [geometric(32, 0.9)], 400)

    assert np.median(counts[150:]) == 8
    assert np.mean(np.array(counts[150:]) == 8) > 0.9


def test_a_batch_spends_its_nodes_where_they_survive() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))
    good, bad = geometric(8, 0.9), geometric(8, 0.05)

    run(controller, lambda b, n: 0.010 if n <= 8 else 0.050, [good, bad], 200)
    chosen = controller.choose([good, bad]).nodes

    assert len(chosen[0]) > len(chosen[1])


def test_nobody_is_made_slower_for_the_sake_of_others() -> None:
    """Nodes for one of two sequences: 5.5 tokens instead of 2, in 2.4 times the time.  That is more
    tokens per second, at the expense of the one that has no drafts."""

    def dear(num_sequences: int, num_nodes: int) -> float:
        return 0.024 if num_nodes else 0.010

    drafts, none = geometric(4, 0.95), SequenceDraft(EMPTY_FLOATS)
    alone = run(BudgetController(BudgetRules(max_draft_tokens=16)), dear, [drafts, none], 400)
    both = run(BudgetController(BudgetRules(max_draft_tokens=16)), dear, [drafts, drafts], 400)

    assert np.mean(np.array(alone[100:]) == 0) > 0.95
    assert np.mean(np.array(both[100:]) == 8) > 0.9


@given(
    st.lists(
        st.lists(st.sampled_from([0.0, 1e-12, 0.1, 0.3, 0.5, 0.9, 1.0]), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    )
)
def test_gains_add_up_to_the_logarithm_of_the_tokens(survivals: list[list[float]]) -> None:
    best_first = -np.sort(-np.array(survivals), axis=1)

    gains = marginal_gains(best_first)

    assert (np.diff(gains, axis=1) <= 0.0).all()
    np.testing.assert_allclose(gains.sum(axis=1), np.log1p(best_first.sum(axis=1)), rtol=1e-9)


def test_weights_move_nodes_to_the_heavier_class(warm: BudgetController) -> None:
    warm.record(2, 0, 0.01)
    controller = BudgetController(BudgetRules(max_draft_tokens=16, max_step_nodes=4))
    for _ in range(3):
        controller.record(2, 0, 0.01)
    light, heavy = geometric(8, 0.8), geometric(8, 0.7)

    even = controller.choose([light, heavy]).nodes
    weighted = controller.choose([light, SequenceDraft(heavy.survival, weight=10.0)]).nodes

    assert len(even[0]) >= len(even[1])
    assert (len(weighted[0]), len(weighted[1])) == (0, 4)


def test_it_adapts_when_drafts_become_costly_and_when_they_become_cheap_again() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    cheap = run(controller, free_drafts, [geometric(16)], 300)
    costly = run(controller, costly_drafts, [geometric(16)], 1500)
    again = run(controller, free_drafts, [geometric(16)], 3000)

    assert cheap[-1] == 16
    assert np.mean(np.array(costly[-200:]) == 0) > 0.9
    assert np.mean(np.array(again[-200:])) > 4


def test_nothing_is_drafted_before_plain_steps_are_measured() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    assert run(controller, free_drafts, [geometric(16)], 3) == [0, 0, 0]
    assert controller.choose([geometric(16)]).nodes[0].size > 0


def test_exploration_grows_by_doublings() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=256))

    counts = run(controller, free_drafts, [geometric(256, 0.99)], 40)

    largest = 4
    for count in counts:
        assert count <= 2 * max(largest, 2)
        largest = max(largest, count)
    assert largest >= 64


@pytest.mark.parametrize(("num_sequences", "first"), [(1, 4), (4, 16), (16, 16), (32, 32)])
def test_many_sequences_try_one_node_each_first(num_sequences: int, first: int) -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    counts = run(controller, free_drafts, [geometric(16, 0.99)] * num_sequences, 5)

    assert next(count for count in counts if count) == first


def test_a_gain_below_the_hysteresis_does_not_start_speculation() -> None:
    controller = BudgetController(
        BudgetRules(max_draft_tokens=4, hysteresis=0.03, probe_interval=10_000)
    )

    counts = run(controller, free_drafts, [SequenceDraft(np.array([0.02], np.float32))], 50)

    assert counts == [0] * 50


def test_one_slow_step_does_not_end_speculation(warm: BudgetController) -> None:
    warm.record(1, 16, 5.0)

    assert len(warm.choose([geometric(16)]).nodes[0]) == 16


def test_plain_steps_are_probed_now_and_then() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16, probe_interval=50))

    counts = run(controller, free_drafts, [geometric(16)], 1000)

    assert 5 <= counts[100:].count(0) <= 40


def test_equal_histories_give_equal_choices() -> None:
    def history() -> list[int]:
        generator = np.random.default_rng(5)
        controller = BudgetController(BudgetRules(max_draft_tokens=12))
        counts: list[int] = []
        for _ in range(300):
            drafts = [geometric(12, float(generator.uniform(0.2, 0.9))) for _ in range(3)]
            time_s = float(generator.uniform(0.9, 1.1))
            counts += run(controller, lambda b, n, s=time_s: s * (0.01 + 1e-4 * n), drafts, 1)
        return counts

    assert history() == history()


@pytest.mark.parametrize("survival", [[], [0.0, 0.0], [np.nan]])
def test_worthless_drafts_are_never_verified(warm: BudgetController, survival: list[float]) -> None:
    assert warm.choose([SequenceDraft(np.array(survival, np.float32))]).nodes[0].size == 0


def test_an_empty_batch_has_no_choices(warm: BudgetController) -> None:
    assert warm.choose([]).nodes == []


# ---- The table


def test_buckets_round_up_to_edges() -> None:
    assert [bucket(n) for n in (0, 1, 5, 6, 7, 2048, 99_999)] == [0, 1, 6, 6, 8, 2048, 2048]
    assert all(low < high <= max(1.5 * low, low + 2) for low, high in itertools.pairwise(EDGES))


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0.001, 1.0)), min_size=1, max_size=60))
def test_estimates_never_fall_with_the_number_of_nodes(
    steps: list[tuple[int, float]],
) -> None:
    times = StepTimes(min_samples=1)
    for num_nodes, time_s in steps:
        times.record(2, num_nodes, time_s)

    estimates = [times.estimate(2, n) for n in range(0, 200, 3)]

    assert all(low <= high + 1e-12 for low, high in itertools.pairwise(estimates))


def test_unmeasured_cells_are_interpolated_and_flat_beyond_the_last() -> None:
    times = StepTimes(min_samples=1)
    times.record(1, 0, 0.010)
    times.record(1, 8, 0.018)

    assert times.estimate(1, 4) == pytest.approx(0.014)
    assert times.estimate(1, 64) == pytest.approx(0.018)
    assert times.frontier(1) == 8


def test_an_unmeasured_batch_size_goes_by_the_nearest_one_with_plain_steps() -> None:
    times = StepTimes(min_samples=1)
    assert times.estimate(7, 0) is None
    times.record(1, 0, 0.010)
    times.record(12, 0, 0.020)
    times.record(8, 4, 0.5)

    assert times.estimate(7, 0) == pytest.approx(0.020)
    assert times.estimate(2, 5) == pytest.approx(0.010)
    assert times.frontier(7) == 0
    times.record(8, 0, 0.015)
    assert times.estimate(7, 0) == pytest.approx(0.015)
    assert times.frontier(7) == 4


def test_a_batch_size_whose_steps_are_never_recorded_is_drafted_for_by_its_neighbour(
    warm: BudgetController,
) -> None:
    """As under a steady stream of prompts, of which every step computes a chunk."""
    drafts = [geometric(16)] * 6

    counts = [sum(len(nodes) for nodes in warm.choose(drafts).nodes) for _ in range(160)]

    assert set(counts[:16]) == {0}
    assert sum(count > 0 for count in counts[16:]) >= 130


# ---- A change of load


def scaled(step_time: StepTime, factor: float) -> StepTime:
    return lambda num_sequences, num_nodes: factor * step_time(num_sequences, num_nodes)


@pytest.mark.parametrize("factor", [0.3, 3.0])
def test_a_change_of_load_is_dealt_with_within_two_dozen_steps(factor: float) -> None:
    """At 40 ms a step, within a second."""
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    def staircase(b: int, n: int) -> float:
        return 0.010 if n <= 8 else 0.025

    run(controller, staircase, [geometric(16, 0.9)], 300)
    counts = run(controller, scaled(staircase, factor), [geometric(16, 0.9)], 100)

    assert counts[24:].count(8) >= 70
    for num_nodes in (0, 8):
        assert controller.estimate(1, num_nodes) == pytest.approx(factor * 0.010)


def test_speculation_that_has_become_too_dear_stops_within_a_dozen_steps() -> None:
    controller = BudgetController(BudgetRules(max_draft_tokens=16))

    run(controller, free_drafts, [geometric(16)], 300)
    counts = run(controller, costly_drafts, [geometric(16)], 60)

    assert counts[12:].count(0) >= 40


def test_three_slow_samples_in_a_row_outvote_all_before() -> None:
    times = StepTimes()
    for _ in range(9):
        times.record(1, 0, 0.010)
        times.record(1, 4, 0.012)
    for _ in range(2):
        times.record(1, 4, 0.024)
    assert times.estimate(1, 4) == pytest.approx(0.012)
    times.record(1, 4, 0.024)
    assert times.estimate(1, 4) == pytest.approx(0.024)
    assert times.is_doubtful(1, 0)
    for _ in range(3):
        times.record(1, 0, 0.010)
    assert times.estimate(1, 0) == pytest.approx(0.010)
    assert not times.is_doubtful(1, 0)


def test_the_high_quantile_is_of_recent_times_and_ignores_single_strays() -> None:
    times = StepTimes(stale_after=16)
    for time_s in (0.010, 0.010, 0.012, 0.010, 0.011, 0.010, 0.5, 0.010, 0.010):
        times.record(1, 4, time_s)
    assert times.high(1, 4) == pytest.approx(0.011, abs=0.0011)
    for time_s in (0.030, 0.010, 0.030, 0.010, 0.030, 0.010):
        times.record(1, 4, time_s)
    assert times.high(1, 4) == pytest.approx(0.030)
    for _ in range(16):
        times.record(2, 0, 0.010)
    assert times.high(1, 4) == times.estimate(1, 4), "what was measured long ago is not recent"
