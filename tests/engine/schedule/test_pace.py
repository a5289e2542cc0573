"""Chunks of prompts are bounded in time, whatever rows cost on a machine; by a virtual clock."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.config.schema import EngineConfig
from cluster.core import token_array
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.scheduler import PromptPace
from cluster.engine.work import StepSummary, Work
from cluster.spec.step_profile import StepProfile
from tests.support.engine.driver import GreedyDecoder, load_engine, prompt
from tests.support.engine.slowed import SLOW, slow_down

LIMIT_S = EngineConfig().max_chunk_s
QUICK = 0.001, 0.0001
MANY_ROWS = 512


class Slowed:
    """An engine whose forward passes take what they cost by a clock of its own."""

    def __init__(
        self,
        folder: Path,
        costs: tuple[float, float],
        prompts: dict[str, np.ndarray],
        num_tokens: int = 1000,
    ) -> None:
        self.engine = load_engine(
            folder, num_pages=4096, max_batch_tokens=MANY_ROWS, prefix_cache=False
        )
        self.clock = slow_down(self.engine, costs)
        self.decoder = GreedyDecoder(self.engine, prompts, num_tokens)

    def steps(self, is_over: Callable[[], bool]) -> Iterator[float]:
        """Run until then; the seconds of each step."""
        while not is_over():
            began = self.clock.now
            self.decoder.step()
            yield self.clock.now - began


def prompts(count: int, length: int) -> dict[str, np.ndarray]:
    return {f"p{number}": prompt(length, seed=number) for number in range(count)}


def read_beside_a_text(
    folder: Path, costs: tuple[float, float], chunk_rows: int | None = None
) -> list[float]:
    """Seconds between the tokens of a text while six prompts are read beside it.

    chunk_rows: None = by the clock."""
    six = prompts(6, 240)
    slowed = Slowed(folder, costs, {"text": prompt(4), **six})
    if chunk_rows:
        step = slowed.engine.step
        slowed.engine.step = lambda: step(prompt_rows=chunk_rows)
    slowed.decoder.start("text")
    list(slowed.steps(lambda: len(slowed.decoder.text("text")) >= 5))
    for name in six:
        slowed.decoder.start(name)
    return list(slowed.steps(lambda: all(slowed.decoder.text(name) for name in six)))


def test_a_text_waits_for_no_chunk_longer_than_the_bound(llama_folder: Path):
    gaps = read_beside_a_text(llama_folder, SLOW)
    # The first chunk is the largest, for this engine has measured nothing yet.  Texts whose prompts
    # it read to their ends have rows of their own in the next step.
    assert max(gaps[1:]) <= LIMIT_S + 6 * SLOW[1]
    assert max(gaps[2:]) <= LIMIT_S + SLOW[1]
    whole = read_beside_a_text(llama_folder, SLOW, MANY_ROWS)
    assert max(whole) > 10 * LIMIT_S
    # Each chunk reads the weights anew, and texts that go on beside it have rows in each.
    assert sum(gaps) <= 1.25 * sum(whole)


def test_a_quick_machine_reads_in_the_largest_chunks(llama_folder: Path):
    whole = read_beside_a_text(llama_folder, QUICK, MANY_ROWS)
    assert read_beside_a_text(llama_folder, QUICK) == pytest.approx(whole)


def test_chunks_by_the_clock_change_no_text(llama_folder: Path):
    texts = [
        Slowed(llama_folder, costs, prompts(3, 100), 20).decoder.run() for costs in (SLOW, QUICK)
    ]
    assert texts[0] == texts[1]


def took(rows: int, costs: tuple[float, float], num_prompt_rows: int = 0) -> StepSummary:
    time_s = costs[0] + costs[1] * rows
    return StepSummary(num_rows=rows, num_prompt_rows=num_prompt_rows, step_time_s=time_s)


DECODING = [Sequence("text", 0, page_size=4, work=Work("text", 3, token_array([1])))]


def pace_beside_a_text() -> PromptPace:
    pace = PromptPace(MANY_ROWS, LIMIT_S)
    pace.rows(DECODING)
    return pace


def fitting(costs: tuple[float, float]) -> float:
    return (LIMIT_S - costs[0]) / costs[1]


def test_the_first_chunk_goes_by_the_profile_of_the_machine():
    pace = pace_beside_a_text()
    rows = [1, 64, 192]
    profile = StepProfile.of(rows, [SLOW[0] + SLOW[1] * each for each in rows])
    pace.begin(profile)
    assert pace.beside_others == int(fitting(SLOW))
    assert pace.rows([]) == 4 * int(fitting(SLOW))  # no text is decoded


def test_the_end_of_a_prompt_says_nothing_of_a_whole_chunk():
    pace = pace_beside_a_text()
    pace.learn(took(64, SLOW, 64))
    rows = pace.rows(DECODING)
    pace.learn(took(2, (0.1, 0.0), 2))
    assert pace.beside_others == rows


def test_one_step_in_which_the_machine_was_stopped_is_made_good_in_a_few_chunks():
    pace = pace_beside_a_text()
    pace.learn(took(MANY_ROWS, (20.0, 0.0), MANY_ROWS))
    for _ in range(5):
        rows = pace.rows(DECODING)
        assert rows < MANY_ROWS
        pace.learn(took(rows, QUICK, rows))
    assert pace.beside_others == MANY_ROWS


def test_where_a_plain_step_is_long_a_chunk_may_take_as_long_again():
    costs = 1.0, 0.1
    pace = pace_beside_a_text()
    for _ in range(9):
        pace.learn(replace(took(1, costs), num_sequences=1))
        rows = pace.rows(DECODING)
        pace.learn(took(rows, costs, rows))
    # One row is that of the text in decoding: 1.1 s, and as much again.
    assert 10 <= pace.beside_others <= 12


def test_chains_of_scored_texts_do_not_pass_for_plain_steps():
    pace = pace_beside_a_text()
    for _ in range(20):
        rows = pace.rows(DECODING)
        pace.learn(replace(took(rows, SLOW), num_sequences=1, num_nodes=rows))
        pace.learn(took(rows, SLOW, rows))
    assert pace.beside_others <= fitting(SLOW) * LIMIT_S / (LIMIT_S - SLOW[0])
