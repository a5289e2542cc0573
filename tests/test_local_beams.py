"""`LLM.beam_search`: beams through coordinator and target, beside requests that draft."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config.schema import Config
from cluster.core import SamplingParams, token_array
from cluster.errors import RequestError
from cluster.local import LLM
from cluster.requests.fields import BeamSpec, EarlyStopping
from tests.engine.test_beam_search import expected
from tests.support.engine.driver import load_oracle, prompt
from tests.support.local_models import PROMPTS, drafters, drafting, hf_greedy, ids_of, target

pytestmark = pytest.mark.usefixtures("tireless_residents")

STOPS = tuple(range(0, 288, 24))
NUM_TOKENS = 16


def asked(num_beams: int, early_stopping: EarlyStopping = False, **more: Any) -> SamplingParams:
    beams = BeamSpec(num_beams, early_stopping=early_stopping)
    defaults = {"temperature": 0.7, "max_tokens": NUM_TOKENS, "stop_token_ids": STOPS}
    return SamplingParams(**{**defaults, "beams": beams, **more})


@pytest.fixture(scope="module")
def llm(llama_folder: Path, draft_folder: Path) -> Iterator[LLM]:
    with LLM(drafting(llama_folder, drafters(draft_folder))) as running:
        yield running


@pytest.fixture(scope="module")
def oracle(llama_folder: Path) -> Any:
    return load_oracle(llama_folder)


def test_requests_beside_a_search_go_on_with_their_drafts(
    llm: LLM, llama_folder: Path, oracle: Any
):
    greedy = SamplingParams(temperature=0.0, max_tokens=40)
    with ThreadPoolExecutor(2) as pool:
        searched = pool.submit(llm.beam_search, PROMPTS * 2, asked(5), ignore_eos=True)
        texts = [each for _ in range(3) for each in llm.generate(PROMPTS, greedy)]
        found = searched.result()
    assert ids_of(texts) == 3 * hf_greedy(llama_folder, PROMPTS, 40)
    assert sum(one.stats.num_accepted_draft_tokens for one in texts) > 0
    spec = BeamSpec(5)
    for ids, completions in zip(PROMPTS * 2, found, strict=True):
        wanted = expected(oracle, token_array(ids), spec, NUM_TOKENS, STOPS)
        assert ids_of(completions) == [
            text[:-1] if text[-1] in STOPS else text for text, _ in wanted
        ]


def test_log_probabilities_add_up_to_what_the_texts_are_ranked_by(llm: LLM):
    (found,) = llm.beam_search(PROMPTS[0], asked(4, logprobs=2, stop_token_ids=()), ignore_eos=True)
    for one in found:
        assert one.beam is not None
        assert len(one.logprobs) == len(one.token_ids) == NUM_TOKENS
        assert sum(each.logprob for each in one.logprobs) == pytest.approx(
            one.beam.logprob, abs=1e-4
        )
        assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob for each in one.logprobs)


def test_beams_of_too_many_tokens_are_refused_with_the_remedy(llm: LLM):
    with pytest.raises(RequestError, match=r"40 beams of 200 tokens are 8000.*smaller max_tokens"):
        llm.beam_search(PROMPTS[0], asked(40, max_tokens=200))


def test_a_search_that_might_not_find_room_is_refused_with_the_reason(
    llama_folder: Path, oracle: Any
):
    """The pool has 512 tokens: four beams of 100 behind 60 fit, five do not."""
    config = Config(target=target(llama_folder, num_pages=32), drafters={})
    ids = prompt(60)
    with LLM(config) as llm:
        (found,) = llm.beam_search([ids], asked(4, max_tokens=100), ignore_eos=True)
        assert len(found) == 4
        with pytest.raises(RequestError, match=r"cannot be sure of their place.*all 32 pages"):
            llm.beam_search([ids], asked(5, max_tokens=100), ignore_eos=True)
        # Nothing is left behind, and four searches that take each other's pages end as one does.
        texts = llm.beam_search([ids] * 4, asked(4, max_tokens=100), ignore_eos=True)
        assert all(ids_of(each) == ids_of(found) for each in texts)
        assert np.isfinite([one.beam.score for one in found if one.beam is not None]).all()
