"""`LLM` with grammars, end to end: valid answers, the same with speculation on and off."""

import json
from collections.abc import Iterator
from dataclasses import replace

import jsonschema
import pytest

from cluster.core import FinishReason, SamplingParams
from cluster.local import LLM
from tests.support.grammar.specs import SCHEMA, SPECS
from tests.support.matrix import PLAIN, PROMPTS, config

pytestmark = pytest.mark.usefixtures("tireless_residents")

GREEDY = SamplingParams(temperature=0.0, max_tokens=80, grammar=SPECS["json_schema"])
LAWS = {
    "top_p": replace(GREEDY, temperature=1.0, top_p=0.9, seed=3),
    "min_tokens": replace(GREEDY, min_tokens=20),
}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    whole = config()
    drafters = {name: whole.drafters[name] for name in ("grammar", "suffix")}
    with LLM(replace(whole, drafters=drafters, tasks={})) as opened:
        yield opened


@pytest.mark.parametrize("params", LAWS.values(), ids=LAWS)
def test_answers_are_valid_and_do_not_depend_on_drafts(llm: LLM, params: SamplingParams):
    plain = llm.generate(PROMPTS, params, speculation=PLAIN)
    drafted = llm.generate(PROMPTS, params)
    for one, other in zip(plain, drafted, strict=True):
        assert other.token_ids == one.token_ids
        assert one.stats.num_draft_tokens == 0
        assert other.finish_reason is FinishReason.STOP
        jsonschema.validate(json.loads(other.text), SCHEMA)
    assert sum(each.stats.num_accepted_draft_tokens for each in drafted) > 0


@pytest.mark.parametrize("name", ["regex", "choice", "lark", "gbnf", "structural_tag"])
def test_every_kind_of_grammar_ends_by_itself(llm: LLM, name: str):
    params = replace(GREEDY, grammar=SPECS[name], temperature=0.8, seed=1, max_tokens=200)
    for completion in llm.generate(PROMPTS, params):
        assert completion.finish_reason is FinishReason.STOP
        assert completion.text
