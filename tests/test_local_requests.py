"""`LLM` with what a request may ask for, beside drafts: adapters, beams, texts far longer than a
draft model's window, and sampling numbers at the edges of their type."""

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster.config.schema import Config
from cluster.core import SamplingParams, SpeculationOptions, token_array
from cluster.errors import NotFoundError
from cluster.local import LLM
from cluster.requests.fields import BeamSpec
from tests.engine.test_beam_search import expected
from tests.support.checkpoints import noisy_copy
from tests.support.choices import by_night
from tests.support.engine.adapters import ATTENTION, EVERYTHING, write_adapter
from tests.support.engine.driver import load_oracle, prompt
from tests.support.errors import request_error
from tests.support.local_models import (
    GREEDY,
    PLAIN,
    PROMPTS,
    SEEDED,
    drafters,
    drafting,
    hf_greedy,
    ids_of,
    metrics_once,
    target,
)

pytestmark = pytest.mark.usefixtures("tireless_residents")

_WINDOW = 40
_LONG = replace(GREEDY, max_tokens=64)
_LONG_PROMPTS = [prompt(150, seed).tolist() for seed in (1, 2)]


@pytest.fixture(scope="module")
def llm(llama_folder: Path, draft_folder: Path) -> Iterator[LLM]:
    """Its draft model has a window."""
    found = drafters(draft_folder)
    lm = replace(found["lm"], options={**found["lm"].options, "context_window": _WINDOW})
    with LLM(drafting(llama_folder, {"lm": lm, "lookup": found["lookup"]})) as opened:
        yield opened


def test_a_model_drafts_along_texts_beyond_its_window(llm: LLM, llama_folder: Path):
    completions = llm.generate(_LONG_PROMPTS, _LONG)
    assert ids_of(completions) == hf_greedy(llama_folder, _LONG_PROMPTS, 64)
    assert all(each.stats.accepted_by_drafter.get("lm", 0) > 0 for each in completions)


def test_a_second_turn_finds_as_much_in_the_prefix_cache_as_without_drafts(llm: LLM):
    hits = {}
    for name, speculation in (("plain", PLAIN), ("drafted", None)):
        # Tenants of their own share no pages.
        first = llm.generate(_LONG_PROMPTS, _LONG, cache_salt=name, speculation=speculation)
        turns = [
            [*prompt, *answer.token_ids, 5, 6, 7]
            for prompt, answer in zip(_LONG_PROMPTS, first, strict=True)
        ]
        again = llm.generate(turns, _LONG, cache_salt=name, speculation=speculation)
        hits[name] = sum(each.num_cached for each in again) / sum(map(len, turns))
    assert hits["plain"] > 0.9
    assert abs(hits["drafted"] - hits["plain"]) <= 0.01


STOPS = tuple(range(0, 288, 24))
NUM_TOKENS = 16


def asked(num_beams: int, **more: Any) -> SamplingParams:
    defaults = {"temperature": 0.7, "max_tokens": NUM_TOKENS, "stop_token_ids": STOPS}
    return SamplingParams(**{**defaults, "beams": BeamSpec(num_beams), **more})


def test_requests_beside_a_search_go_on_with_their_drafts(llm: LLM, llama_folder: Path):
    greedy = replace(GREEDY, max_tokens=40)
    with ThreadPoolExecutor(2) as pool:
        searched = pool.submit(llm.beam_search, PROMPTS * 2, asked(5), ignore_eos=True)
        texts = [each for _ in range(3) for each in llm.generate(PROMPTS, greedy)]
        found = searched.result()
    assert ids_of(texts) == 3 * hf_greedy(llama_folder, PROMPTS, 40)
    assert sum(one.stats.num_accepted_draft_tokens for one in texts) > 0
    oracle, spec = load_oracle(llama_folder), BeamSpec(5)
    for ids, completions in zip(PROMPTS * 2, found, strict=True):
        wanted = expected(oracle, token_array(ids), spec, NUM_TOKENS, STOPS)
        assert ids_of(completions) == [
            text[:-1] if text[-1] in STOPS else text for text, _ in wanted
        ]


def test_log_probabilities_add_up_to_what_the_texts_are_ranked_by(llm: LLM):
    (found,) = llm.beam_search(PROMPTS[0], asked(4, logprobs=2, stop_token_ids=()), ignore_eos=True)
    for one in found:
        assert len(one.logprobs) == len(one.token_ids) == NUM_TOKENS
        assert sum(each.logprob for each in one.logprobs) == pytest.approx(
            one.beam.logprob, abs=1e-4
        )
        assert all(len(each.top) == 2 and each.top[0][1] >= each.logprob for each in one.logprobs)


def test_beams_of_too_many_tokens_are_refused_with_the_remedy(llm: LLM):
    with request_error(r"40 beams of 200 tokens are 8000.*smaller max_tokens"):
        llm.beam_search(PROMPTS[0], asked(40, max_tokens=200))


def test_a_search_that_might_not_find_room_is_refused_with_the_reason(llama_folder: Path):
    """The pool has 512 tokens: four beams of 100 behind 60 fit, five do not."""
    ids, four = prompt(60), asked(4, max_tokens=100)
    with LLM(Config(target=target(llama_folder, num_pages=32), drafters={})) as llm:
        (found,) = llm.beam_search([ids], four, ignore_eos=True)
        assert len(found) == 4
        with request_error(r"cannot be sure of their place.*all 32 pages"):
            llm.beam_search([ids], asked(5, max_tokens=100), ignore_eos=True)
        # Nothing is left behind, and four searches that take each other's pages end as one does.
        texts = llm.beam_search([ids] * 4, four, ignore_eos=True)
        assert all(ids_of(each) == ids_of(found) for each in texts)
        assert np.isfinite([one.beam.score for one in found]).all()


@pytest.fixture(scope="module")
def adapted(
    checkpoint_factory: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    root = tmp_path_factory.mktemp("adapters")
    base = checkpoint_factory("llama", head_dim=16)
    written = {
        "a": write_adapter(base, root / "a", EVERYTHING, seed=1),
        "b": write_adapter(base, root / "b", ATTENTION, rank=3, seed=2),
        "c": write_adapter(base, root / "c", ("up_proj",), rank=7, seed=3),
    }
    config = drafting(base, drafters(noisy_copy(base, root / "noisy")))
    adapters = {name: str(folder) for name, folder in written.items()}
    engine = replace(config.target.engine, adapters=adapters)
    with LLM(replace(config, target=replace(config.target, engine=engine))) as opened:
        yield opened


def test_the_seeded_text_of_an_adapter_is_the_same_with_and_without_drafts(adapted: LLM):
    drafted, plain = (
        ids_of(adapted.generate(PROMPTS, SEEDED, adapter="a", speculation=how))
        for how in (None, PLAIN)
    )
    assert drafted == plain


def test_acceptance_is_learned_for_each_adapter(adapted: LLM):
    for name in ("a", "b"):
        adapted.generate(PROMPTS, GREEDY, adapter=name)
    for name in ("a", "b"):
        metrics_once(adapted, lambda page, task=f'task="default@{name}"': task in page)


def test_an_unknown_adapter_is_refused_by_name(adapted: LLM):
    with pytest.raises(NotFoundError, match="'sql'; adapters: a, b, c"):
        adapted.generate([5, 6], GREEDY, adapter="sql")


TINY, LARGE = 5e-324, 1e300
EDGES = {
    "least temperature": {"temperature": TINY},
    "temperature that is nothing in single precision, min_p": {"temperature": 1e-46, "min_p": 0.1},
    "subnormal temperature, top_p": {"temperature": 1e-40, "top_p": TINY},
    "least temperature, top_k": {"temperature": TINY, "top_k": 1},
    "greatest temperature": {"temperature": LARGE},
    "least top_p": {"top_p": TINY},
    "top_p below 1": {"top_p": 1 - 2**-53, "top_k": 2**31 - 1},
    "least min_p": {"min_p": TINY},
    "whole min_p": {"min_p": 1.0},
    "least repetition": {"repetition_penalty": TINY},
    "small repetition": {"repetition_penalty": 1e-38, "temperature": 0.0},
    "small repetition, least temperature": {"repetition_penalty": 1e-38, "temperature": TINY},
    "greatest repetition": {"repetition_penalty": LARGE},
    "greatest presence": {"presence_penalty": LARGE, "frequency_penalty": LARGE},
    "least presence": {"presence_penalty": -LARGE, "frequency_penalty": -LARGE},
}


@by_night
def test_every_edge_has_a_text_that_no_drafter_changes(
    llama_folder: Path, draft_folder: Path, caplog: pytest.LogCaptureFixture
):
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(EDGES))]
    params = [SamplingParams(seed=7, max_tokens=24, **more) for more in EDGES.values()]
    with LLM(drafting(llama_folder, drafters(draft_folder, ("lm", "lookup")))) as llm:
        plain = llm.generate(prompts, params, speculation=PLAIN)
        caplog.set_level(logging.WARNING)
        caplog.clear()
        for names in (None, ("lm",), ("lookup", "ngram")):
            drafted = llm.generate(prompts, params, speculation=SpeculationOptions(drafters=names))
            for name, before, after in zip(EDGES, plain, drafted, strict=True):
                assert len(after.token_ids) > 0, name
                assert after.token_ids == before.token_ids, name
        assert caplog.text == ""  # no drafter has raised or lied
