"""What an engine finds out of its own steps before it serves."""

from pathlib import Path

import pytest
import torch

from cluster.engine.graphs.forward import WIDTHS
from cluster.engine.loading.profile import profile_steps
from cluster.engine.work import Output, Work
from cluster.spec.step_profile import StepProfile
from tests.support.engine.driver import load_engine, num_cached, prompt, rows, run


class Clocked:
    """An engine whose steps take a millisecond, and `row_s` more for each row beyond 12."""

    vocab_size = 1000

    def __init__(
        self, max_nodes: int = 10_000, slow_from: int = 10_000, row_s: float = 0.001
    ) -> None:
        self.now = 0.0
        self.sizes = []
        self.released = []
        self._max_nodes, self._slow_from, self._row_s = max_nodes, slow_from, row_s
        self._work: Work | None = None

    def clock(self) -> float:
        return self.now

    def submit(self, work: Work) -> None:
        self._work = work

    def step(self) -> list[Output]:
        work = self._work
        num_rows = len(work.delta) + len(work.tree)
        if len(work.tree) > self._max_nodes:
            return [Output(work.request_id, have_len=0)]
        if work.base_len:
            assert len({*work.delta, *work.tree.token_ids}) == num_rows, (
                "of a mixture of experts, rows that are alike would read the same weights"
            )
            self.sizes.append(num_rows)
            first = self.sizes.count(num_rows) == 1
            self.now += (0.001 + self._row_s * max(num_rows - 12, 0)) * (2 if first else 1)
            self.now += 5.0 if num_rows >= self._slow_from else 0.0
        return [Output(work.request_id, logits=torch.zeros(1, 100))]

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


def profiled(engine: Clocked, max_rows: int) -> StepProfile:
    found = profile_steps(engine, max_rows, engine.clock)
    assert engine.released == ["step-profile"]
    return found


def test_the_profile_is_what_steps_take_by_their_rows_once_warm():
    found = profiled(Clocked(), 64)
    assert found.rows == (1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32, 40, 48, 64)
    expected = [0.001 * (1 + max(size - 12, 0)) for size in found.rows]
    assert found.times_s == pytest.approx(expected)


def test_the_profile_goes_as_far_as_a_gpus_graphs_and_on_a_cpu_half_as_far(
    llama_folder: Path,
):
    assert profiled(Clocked(row_s=1e-5), 2048).rows[-3:] == (256, 384, WIDTHS[-1])
    assert load_engine(llama_folder, max_batch_tokens=512).profile_steps().rows[-1] <= 256


def test_it_ends_in_time_and_says_what_it_knows_by_then():
    engine = Clocked(slow_from=1)
    assert profiled(engine, 256).rows == (1, 32)
    assert engine.sizes == [1, 32, 1, 32]


def test_sizes_that_the_cache_has_no_room_for_are_left_out():
    assert profiled(Clocked(max_nodes=20), 256).rows[-1] == 20


def test_an_engine_without_room_for_anything_has_none():
    assert profile_steps(Clocked(max_nodes=-1), 64) is None


def test_a_real_engine_is_left_as_it_was(llama_folder: Path):
    engine, other = load_engine(llama_folder), load_engine(llama_folder)
    found = engine.profile_steps()
    assert found.rows[0] == 1
    assert found.rows[-1] <= engine.config.max_batch_tokens
    assert (engine.pages_in_use, num_cached(engine)) == (0, 0)
    work = Work("a", 0, prompt(20))
    torch.testing.assert_close(rows(run(engine, work)), rows(run(other, work)))
