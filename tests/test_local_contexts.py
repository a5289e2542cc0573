"""Texts far longer than a draft model's window: drafts go on, and text and prefix hits are those
without drafts."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from tests.support.local_models import PLAIN, drafters, drafting, hf_greedy, ids_of

pytestmark = pytest.mark.usefixtures("tireless_residents")

GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
PROMPTS = [np.random.default_rng(seed).integers(4, 288, 150).tolist() for seed in (1, 2)]
_WINDOW = 40


@pytest.fixture(scope="module")
def llm(llama_folder: Path, draft_folder: Path) -> Iterator[LLM]:
    found = drafters(draft_folder)
    lm = replace(found["lm"], options={**found["lm"].options, "context_window": _WINDOW})
    with LLM(drafting(llama_folder, {"lm": lm, "lookup": found["lookup"]})) as opened:
        yield opened


def test_a_model_drafts_along_texts_beyond_its_window(llm: LLM, llama_folder: Path):
    completions = llm.generate(PROMPTS, GREEDY)
    assert ids_of(completions) == hf_greedy(llama_folder, PROMPTS, 64)
    assert all(each.stats.accepted_by_drafter.get("lm", 0) > 0 for each in completions)


def test_a_second_turn_finds_as_much_in_the_prefix_cache_as_without_drafts(llm: LLM):
    hits = {}
    for name, speculation in (("plain", PLAIN), ("drafted", SpeculationOptions())):
        # Tenants of their own share no pages.
        first = llm.generate(PROMPTS, GREEDY, cache_salt=name, speculation=speculation)
        turns = [
            [*prompt, *answer.token_ids, 5, 6, 7]
            for prompt, answer in zip(PROMPTS, first, strict=True)
        ]
        again = llm.generate(turns, GREEDY, cache_salt=name, speculation=speculation)
        hits[name] = sum(each.num_cached for each in again) / sum(map(len, turns))
    assert hits["plain"] > 0.9
    assert abs(hits["drafted"] - hits["plain"]) <= 0.01
