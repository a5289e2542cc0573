"""The cost of taps is measured on the steps that it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.rounds import taps
from cluster.engine.engine import Engine
from tests.support.engine.driver import load_engine


def test_a_cell_runs_its_steps_with_and_without_taps(
    llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    step = Engine.step

    def noted(engine: Engine, asked: tuple[int, ...] = ()) -> object:
        outputs = step(engine, asked)
        seen.append(asked)
        assert (engine.last_step.taps is None) == (not asked)
        return outputs

    engine = load_engine(llama_folder, max_batch_tokens=256)
    monkeypatch.setattr(Engine, "step", noted)
    found = taps.measure(engine, taps.Cell(2, 3), (1, -1), num_pairs=4)
    in_cell = seen[2:]  # behind the prompts, of one step each
    assert in_cell[:4] == [(1, -1), (), (), (1, -1)]
    assert in_cell.count(()) == in_cell.count((1, -1)) == 4 + 5
    assert engine.last_step.num_rows == 2 * 4
    assert found["pairs"] == 4
    low, high = found["interval"]
    assert 0 < low <= found["ratio"] <= high
    assert engine.pages_in_use == 0


def test_its_taps_are_those_of_eagle_and_the_last() -> None:
    assert taps.default_taps(30) == (2, 15, 27, 30)
