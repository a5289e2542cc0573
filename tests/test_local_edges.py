"""Sampling numbers at the edges of their type, end to end: a text, the same with any drafter."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.core import SamplingParams, SpeculationOptions
from cluster.local import LLM
from tests.support.choices import by_night
from tests.support.local_models import PLAIN, PROMPTS, drafters, drafting

TINY, LARGE = 5e-324, 1e300
EDGES: dict[str, dict[str, float]] = {
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


@pytest.fixture(scope="module")
def llm(llama_folder: Path, draft_folder: Path) -> Iterator[LLM]:
    with LLM(drafting(llama_folder, drafters(draft_folder, ("lm", "lookup")))) as opened:
        yield opened


@by_night
def test_every_edge_has_a_text_that_no_drafter_changes(llm: LLM, caplog: pytest.LogCaptureFixture):
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(len(EDGES))]
    params = [
        SamplingParams(seed=7, max_tokens=24, **more)  # type: ignore[arg-type]
        for more in EDGES.values()
    ]
    plain = llm.generate(prompts, params, speculation=PLAIN)
    caplog.set_level(logging.WARNING)
    for names in (None, ("lm",), ("lookup", "ngram")):
        drafted = llm.generate(prompts, params, speculation=SpeculationOptions(drafters=names))
        for name, before, after in zip(EDGES, plain, drafted, strict=True):
            assert len(after.token_ids) > 0, name
            assert after.token_ids == before.token_ids, name
    assert caplog.text == ""  # no drafter has raised or lied
