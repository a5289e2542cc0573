"""The control loop in the replay: never much slower than plain, nearly as fast as can be.

The texts are made in code; what is measured on recorded ones stands in docs/benchmarks.
"""

from __future__ import annotations

import pytest

from benchmarks.replay.grid import Bench, Cell, Found
from benchmarks.replay.simulate import Adaptive, Fixed, Simulation
from benchmarks.replay.synthetic import texts
from benchmarks.replay.world import CPU, Pool, recorded

TOKENS = {1: 1500, 4: 3000, 16: 5000}


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(texts(32, 80, agreement=0.7), TOKENS)


def run(
    bench: Bench, place: str, behaviour: str, num_sequences: int, machine: str = "cpu"
) -> Found:
    return bench.run(Cell(machine, place, behaviour, "greedy", num_sequences))


@pytest.mark.parametrize("place", ["resident", "own-2"])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_good_drafts_bring_nearly_what_the_best_fixed_budget_brings(
    bench: Bench, place: str, num_sequences: int
) -> None:
    found = run(bench, place, "good", num_sequences)
    assert found.of_best > 0.92  # the first two seconds, in which all is still to be learned
    assert found.of_plain > 0.98
    if num_sequences == 1:
        assert found.of_plain > 1.2


@pytest.mark.parametrize("behaviour", ["random", "sleeping"])
@pytest.mark.parametrize("place", ["resident", "own-8"])
@pytest.mark.parametrize("num_sequences", [1, 16])
def test_bad_drafts_cost_next_to_nothing(
    bench: Bench, place: str, behaviour: str, num_sequences: int
) -> None:
    assert run(bench, place, behaviour, num_sequences).of_plain > 0.97


def test_the_same_cell_gives_the_same_twice(bench: Bench) -> None:
    first, second = (run(bench, "own-2", "mixed", 4) for _ in range(2))
    assert first == second


def test_a_simulation_emits_the_texts_and_plain_steps_take_what_the_curve_says() -> None:
    (text, _) = texts(2, 50, agreement=0.5)
    pool = Pool("resident", {"lm": recorded("lm")})
    outcome = Simulation([text], CPU, pool, 1).run(Fixed(0), num_tokens=100)
    assert (outcome.tokens, outcome.rounds, outcome.nodes) == (100, 100, 0)
    assert outcome.time_s == pytest.approx(100 * CPU.step_s(1, 0), rel=0.02)


def test_what_was_learned_makes_a_restart_start_well() -> None:
    recorded_texts = [text for text in texts(16, 80, agreement=0.8) if not text.is_sampled]
    pool = Pool("resident", {"lm": recorded("lm")})
    simulation = Simulation(recorded_texts, CPU, pool, 1)
    first = Adaptive(CPU, pool)
    simulation.run(first, 1500)
    again = Adaptive(CPU, pool, learned=first.controller.export())
    fresh = Adaptive(CPU, pool)
    # A fresh one is lucky here: it drafts much before it knows what that takes: little.
    assert simulation.run(again, 200).rate >= 0.98 * simulation.run(fresh, 200).rate
