"""The real engine over graphs that are counted, in virtual time: texts come, stop, are cancelled
and preempted, and each says what it says alone."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("triton", reason="triton is not installed")

from cluster.core import SamplingParams
from tests.support.choices import by_day
from tests.support.engine.captures import Recorder
from tests.support.engine.interpreter import interpreted
from tests.support.gpu.load import VOCAB_SIZE, Arrival, null_engine, play, text_behind

# Of pages of 16: three of eight texts fit.
_FEW_PAGES = 40


def _arrivals(seed: int) -> list[Arrival]:
    generator = np.random.default_rng(seed)
    found = []
    for step in np.sort(generator.integers(0, 60, 16)).tolist():
        prompt = generator.integers(0, VOCAB_SIZE, int(generator.integers(1, 160))).tolist()
        cancelled = step + int(generator.integers(1, 40)) if generator.random() < 0.3 else None
        found.append(Arrival(step, prompt, int(generator.integers(1, 90)), cancelled))
    return found


@interpreted
@pytest.mark.parametrize("way", ["plain", "ahead", "drafts"])
@pytest.mark.parametrize("seed", range(by_day(1, 4)))
def test_texts_that_stop_are_cancelled_and_preempted_say_what_they_say_alone(
    llama_folder: Path, seed: int, way: str
):
    arrivals, recorder = _arrivals(seed), Recorder()
    engine = null_engine(llama_folder, recorder, num_pages=_FEW_PAGES, page_size=16)
    before = recorder.num_replays
    is_ahead = way == "ahead"
    played = play(
        engine, arrivals, max_running=8, drafts=way == "drafts", ahead=is_ahead, seed=seed
    )
    assert played.outputs
    for index, found in played.outputs.items():  # which were not cut short
        each = arrivals[index]
        assert found == text_behind(each.prompt, len(found))[len(each.prompt) :]
        assert len(found) >= each.num_tokens
    assert {i for i, each in enumerate(arrivals) if each.cancelled_at is None} <= {*played.outputs}
    assert played.num_missed > 0, "nothing was preempted"
    assert recorder.num_replays - before > played.num_steps // 2
    assert (played.num_ahead > played.num_steps // 8) == is_ahead


@interpreted
@pytest.mark.parametrize(
    "params",
    [{}, {"top_p": 0.9, "min_p": 0.01}, {"presence_penalty": 1.0, "frequency_penalty": 0.5}],
    ids=["all", "truncated", "penalised"],
)
def test_a_step_that_runs_ahead_draws_as_others_do(llama_folder: Path, params: dict[str, float]):
    drawn = SamplingParams(temperature=3.0, seed=7, max_tokens=10_000, **params)
    engine = null_engine(llama_folder, Recorder(), num_pages=_FEW_PAGES, page_size=16)
    one, other = (
        play(engine, _arrivals(1), max_running=8, drafts=False, ahead=ahead, params=drawn)
        for ahead in (False, True)
    )
    assert other.num_ahead > 0 == one.num_ahead
    both = one.outputs.keys() & other.outputs.keys()
    assert len(both) > 8
    for index in both:
        length = min(len(one.outputs[index]), len(other.outputs[index]))
        assert one.outputs[index][:length] == other.outputs[index][:length]
