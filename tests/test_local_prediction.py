"""A prediction makes a text come in fewer steps, right or wrong, and never changes it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cluster.config.schema import DrafterConfig, DrafterPlacement
from cluster.core import SamplingParams
from cluster.errors import RequestError
from cluster.local import LLM, Completion
from tests.support.local_models import PROMPTS, drafting, hf_greedy

pytestmark = pytest.mark.usefixtures("tireless_residents")

GREEDY = SamplingParams(temperature=0.0, max_tokens=48)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=48)
LAWS = pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])


@pytest.fixture(scope="module", params=["target", ""], ids=["inside", "beside"])
def llm(request: pytest.FixtureRequest, llama_folder: Path) -> Iterator[LLM]:
    placement = DrafterPlacement(host=request.param)
    prediction = DrafterConfig(kind="prediction", placement=placement)
    with LLM(drafting(llama_folder, {"prediction": prediction})) as opened:
        yield opened


def written(llm: LLM, params: SamplingParams, predicted: list[int]) -> Completion:
    asked = replace(params, prediction=tuple(predicted))
    (completion,) = llm.generate([PROMPTS[0]], asked, ignore_eos=True)
    return completion


@LAWS
def test_no_prediction_changes_the_text(llm: LLM, params: SamplingParams) -> None:
    plain = written(llm, params, []).token_ids
    edited = [*plain[:20], 3, 4, *plain[24:]]
    for predicted in (plain, edited, plain[10:], [7] * 300, list(reversed(plain))):
        assert written(llm, params, predicted).token_ids == plain


def test_greedy_text_is_what_transformers_generates(llm: LLM, llama_folder: Path) -> None:
    (expected,) = hf_greedy(llama_folder, PROMPTS[:1], GREEDY.max_tokens)
    (completion,) = llm.generate(PROMPTS[:1], replace(GREEDY, prediction=tuple(expected)))
    assert completion.token_ids == expected


@LAWS
def test_a_right_prediction_saves_most_of_the_steps(llm: LLM, params: SamplingParams) -> None:
    plain = written(llm, params, [])
    assert plain.stats.num_draft_tokens == 0
    # A pool drafter is not waited for at every step, so a run may find it late.
    assert any(written(llm, params, plain.token_ids).stats.num_steps <= 12 for _ in range(20))


def test_a_prediction_that_cannot_be_read_is_refused_by_name(llm: LLM) -> None:
    with pytest.raises(RequestError, match="prediction names token 100000") as raised:
        written(llm, GREEDY, [100_000])
    assert raised.value.param == "prediction"
