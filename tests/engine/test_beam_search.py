"""Beam search over the engine equals transformers' own, and its beams hold no page too long."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from cluster.core import SamplingParams, TokenArray
from cluster.engine.beam_search import BeamRun
from cluster.engine.engine import Engine
from cluster.errors import RequestError
from cluster.requests.fields import BeamSpec, EarlyStopping
from tests.support.choices import by_day
from tests.support.engine.beam_search import beam_search
from tests.support.engine.driver import Factory, load_engine, load_oracle, prompt
from tests.support.engine.integrity import check_integrity

NUM_TOKENS = 14
# Of 288 tokens so many end a text that some of the beams do, in the middle of most searches.
STOPS = tuple(range(0, 288, 24))


def expected(
    oracle: Any, ids: TokenArray, spec: BeamSpec, num_tokens: int, stops: Sequence[int]
) -> list[tuple[list[int], float]]:
    """transformers' texts with their scores, without what pads the shorter ones."""
    inputs = torch.as_tensor(ids, dtype=torch.int64)[None]
    output = oracle.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=GenerationConfig(
            num_beams=spec.num_beams,
            num_return_sequences=spec.num_beams,
            do_sample=False,
            max_new_tokens=num_tokens,
            length_penalty=spec.length_penalty,
            early_stopping=spec.early_stopping,
            eos_token_id=list(stops) or None,
            pad_token_id=1,
            return_dict_in_generate=True,
            output_scores=True,
        ),
    )
    texts = []
    for row in output.sequences[:, len(ids) :].tolist():
        end = next((place + 1 for place, token in enumerate(row) if token in stops), len(row))
        texts.append(row[:end])
    return list(zip(texts, output.sequences_scores.tolist(), strict=True))


def prompts(count: int) -> list[TokenArray]:
    return [prompt(3 + 5 * index % 41, seed=index) for index in range(count)]


@pytest.fixture(scope="module")
def engine(llama_folder: Path) -> Engine:
    return load_engine(llama_folder, num_pages=1024)


@pytest.fixture(scope="module")
def oracle(llama_folder: Path) -> Any:
    return load_oracle(llama_folder)


def check(
    engine: Engine, oracle: Any, ids: list[TokenArray], spec: BeamSpec, stops: Sequence[int] = STOPS
) -> int:
    """Compare all texts and scores; returns how many texts ended before the limit."""
    found = beam_search(engine, ids, spec, NUM_TOKENS, stops)
    check_integrity(engine)
    assert engine.pages_in_use == 0
    num_stopped = 0
    for each, hypotheses in zip(ids, found, strict=True):
        wanted = expected(oracle, each, spec, NUM_TOKENS, stops)
        for one, (text, score) in zip(hypotheses, wanted, strict=True):
            assert [beam.token_id for beam in one.beam.lineage()] == text
            assert one.score == pytest.approx(score, rel=1e-5, abs=1e-4)
            num_stopped += one.is_stopped and len(text) < NUM_TOKENS
    return num_stopped


@pytest.mark.parametrize("num_beams", by_day([2, 5], [2, 3, 4, 5]))
def test_many_prompts_at_once_have_the_texts_and_scores_of_transformers(
    engine: Engine, oracle: Any, num_beams: int
):
    num_stopped = check(engine, oracle, prompts(16), BeamSpec(num_beams))
    assert num_stopped > 3, "texts must end in the middle of the search"


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"),
    by_day(
        [(True, 0.7), (False, 2.0), ("never", 0.0), ("never", -1.0)],
        [*product([True, False, "never"], [0.0, 0.7, 2.0, -1.0])],
    ),
)
def test_every_way_of_stopping_and_scoring(
    engine: Engine, oracle: Any, early_stopping: EarlyStopping, length_penalty: float
):
    check(engine, oracle, prompts(6), BeamSpec(3, length_penalty, early_stopping))


def test_without_stop_tokens_all_texts_have_the_length_asked_for(engine: Engine, oracle: Any):
    assert check(engine, oracle, prompts(6), BeamSpec(4), stops=()) == 0


@pytest.mark.parametrize(
    "architecture", by_day(["gemma2"], ["qwen3", "mistral-sliding", "gemma2", "gpt2", "mixtral"])
)
def test_other_architectures_windows_included(architecture: str, checkpoint_factory: Factory):
    folder = checkpoint_factory(architecture)
    check(load_engine(folder), load_oracle(folder), prompts(5), BeamSpec(3))


def test_searches_that_take_each_others_pages_have_the_same_texts(llama_folder: Path, oracle: Any):
    """The pool holds about two of the eight: the others lose their trees and rebuild them."""
    engine = load_engine(llama_folder, num_pages=24)
    num_preempted = 0
    step = engine.step

    def counted(taps: Sequence[int] = ()) -> Any:
        nonlocal num_preempted
        outputs = step(taps)
        num_preempted += engine.last_step.num_preempted
        return outputs

    engine.step = counted
    check(engine, oracle, prompts(8), BeamSpec(3))
    assert num_preempted > 0


def test_beams_that_die_free_their_pages(engine: Engine):
    """What is held never exceeds the shared text and the beams that are alive, page by page."""
    run = BeamRun("a", prompt(10), SamplingParams(max_tokens=40, beams=BeamSpec(4)), engine.limits)
    num_steps, most = 0, 0
    engine.submit(run.work())
    while True:
        (output,) = engine.step()
        run.take(output, engine)
        if run.is_done:
            break
        work = run.work()
        engine.submit(work)
        num_steps += 1
        # The newest four are not evaluated yet.
        assert engine.pages_in_use <= -(-(work.context_len + len(work.tree)) // 4)
        most = max(most, len(work.tree))
    assert num_steps == 39
    assert most < 4 * 39, "some beams must have died, and some tokens must be shared"
    engine.release("a")
    assert engine.pages_in_use == 0


def test_a_search_that_no_pages_can_hold_is_refused_with_the_reason(llama_folder: Path):
    engine = load_engine(llama_folder, num_pages=16)  # 64 tokens
    with pytest.raises(RequestError, match="need more than all 16 pages"):
        beam_search(engine, [prompt(50)], BeamSpec(5, early_stopping="never"), 40)
    assert engine.pages_in_use == 0
    check_integrity(engine)
