"""The control loop in the replay: never much slower than plain, nearly as fast as can be.

The texts are made in code; what is measured on recorded ones stands in docs/benchmarks.
"""

import pytest

from benchmarks.replay.grid import Bench, Cell, Found
from benchmarks.replay.machines import CPU
from benchmarks.replay.rivals import Fixed
from benchmarks.replay.synthetic import texts
from cluster.config.schema import CoordinatorConfig
from cluster.config.speculation import DraftLengthConfig
from cluster.simulate.replay import Adaptive, Simulation
from cluster.simulate.world import Pool, recorded
from tests.support.choices import by_day, by_night, pairwise

SCHEDULES = (
    DraftLengthConfig(kind="constant", num_tokens=2),
    DraftLengthConfig(kind="constant", num_tokens=8),
    DraftLengthConfig(kind="heuristic"),
    DraftLengthConfig(kind="window"),
    DraftLengthConfig(kind="threshold"),
)


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(texts(32, 80, agreement=0.7))


def run(
    bench: Bench, place: str, behaviour: str, num_sequences: int, machine: str = "cpu"
) -> Found:
    return bench.run(Cell(machine, place, behaviour, "greedy", num_sequences))


@pytest.mark.parametrize(
    ("place", "num_sequences"),
    by_day(
        [("resident", 1), ("own-2", 16)],
        [("resident", 1), ("resident", 16), ("own-2", 1), ("own-2", 16)],
    ),
)
def test_good_drafts_bring_nearly_what_the_best_fixed_budget_brings(
    bench: Bench, place: str, num_sequences: int
):
    found = run(bench, place, "good", num_sequences)
    assert found.of_best > 0.92  # the first two seconds, in which all is still to be learned
    assert found.adaptive > 0.98
    if num_sequences == 1:
        assert found.adaptive > 1.2


@pairwise(behaviour=["random", "sleeping"], place=["resident", "own-8"], num_sequences=[1, 16])
def test_bad_drafts_cost_next_to_nothing(
    bench: Bench, place: str, behaviour: str, num_sequences: int
):
    assert run(bench, place, behaviour, num_sequences).adaptive > 0.97


def test_fixed_budgets_pay_for_the_models_that_they_ask():
    cell, own = Cell("cpu", "resident", "good", "greedy", 1), texts(8, 80, agreement=0.7)
    free, paid = (Bench(own, 1.0, models).run(cell) for models in (frozenset(), frozenset({"lm"})))
    assert paid.best < free.best


def test_the_same_cell_gives_the_same_twice():
    short = Bench(texts(4, 40, agreement=0.7), 0.5)
    first, second = (run(short, "own-2", "mixed", 4) for _ in range(2))
    assert first == second


def test_a_simulation_emits_the_texts_and_plain_steps_take_what_the_curve_says():
    (text, _) = texts(2, 50, agreement=0.5)
    pool = Pool({"lm": recorded("lm")})
    outcome = Simulation([text], CPU, pool, 1).run(Fixed(0), 1.0)
    # Each text of 50 tokens begins with a prompt of 8.
    expected_s = outcome.tokens * (0.98 * CPU.step_s(1, 1) + 0.02 * CPU.step_s(8, 1))
    assert outcome.time_s == pytest.approx(expected_s, rel=0.02)


def test_what_was_learned_makes_a_restart_start_well():
    recorded_texts = [text for text in texts(16, 80, agreement=0.8) if not text.is_sampled]
    pool = Pool({"lm": recorded("lm")})
    simulation = Simulation(recorded_texts, CPU, pool, 1)
    first = Adaptive(CPU, pool)
    simulation.run(first, 10.0)
    again, fresh = Adaptive(CPU, pool), Adaptive(CPU, pool)
    again.controller.restore(first.controller.export())
    # A fresh one is lucky here: it drafts much before it knows what that takes: little.
    assert simulation.run(again, 1.0).speed >= 0.98 * simulation.run(fresh, 1.0).speed


@by_night
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_no_schedule_is_much_faster_than_adaptive(bench: Bench, num_sequences: int):
    cell = Cell("cpu", "resident", "good", "greedy", num_sequences)
    adaptive = bench.speed(cell, CoordinatorConfig())
    for schedule in SCHEDULES:
        speed = bench.speed(cell, CoordinatorConfig(draft_length=schedule))
        assert adaptive > 0.96 * speed, schedule
