"""Texts under a grammar belong to it, and no draft changes them."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
import torch

from cluster.core import SamplingParams, TokenTree
from cluster.errors import RequestError
from cluster.requests.fields import GrammarSpec
from cluster.spec.penalties import clear_bits
from cluster.worker.target_parts import Grammars
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.grammar.specs import (
    SCHEMA,
    SPECS,
    VOCAB_SIZE,
    compiler,
    eos,
    ids_of,
    tokenizer,
)
from tests.support.worker.rounds import (
    Session,
    chain_of_the_truth,
    decode,
    decode_all,
    half_right,
    random_drafts,
)
from tests.support.worker.toy_engine import ToyEngine, hashed_law

PROMPT = [30, 10, 40, 10, 50]
LAWS = {
    "greedy": SamplingParams(0.0),
    "seeded": SamplingParams(1.0, seed=3),
    "top_p and penalties": SamplingParams(0.8, top_p=0.9, seed=5, frequency_penalty=0.4),
}
LAW = hashed_law(VOCAB_SIZE)


def verifier(engine: ToyEngine | None = None) -> Verifier:
    grammars = Grammars(compiler(), VOCAB_SIZE, eos())
    return Verifier(engine or ToyEngine(LAW, VOCAB_SIZE), open_hook=grammars.open_hook)


def constrained(law: str, name: str) -> SamplingParams:
    # A random law hardly ever ends a text by itself.
    bias = tuple((token, 30.0) for token in [*eos(), *ids_of('"')])
    return replace(LAWS[law], grammar=SPECS[name], stop_token_ids=eos(), logit_bias=bias)


def until_end(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens[: tokens.index(eos()[0])]))


@pytest.mark.parametrize("name", ["json_schema", "regex"])
@pytest.mark.parametrize("law", LAWS)
def test_no_tree_changes_the_text(name: str, law: str) -> None:
    params = constrained(law, name)
    plain = decode(verifier(), PROMPT, params, num_tokens=100)
    if name == "json_schema":
        jsonschema.validate(json.loads(until_end(plain)), SCHEMA)
    text, length = PROMPT + plain, plain.index(eos()[0]) + 1
    for drafter in (
        chain_of_the_truth(text),
        *(half_right(text, seed, VOCAB_SIZE) for seed in range(by_day(1, 3))),
        random_drafts(1, VOCAB_SIZE),
    ):
        assert decode(verifier(), PROMPT, params, drafter, length) == plain[:length]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_nothing_else_adjusts_belongs_to_its_grammar(temperature: float) -> None:
    # Such rows are masked within the native draw, where there is one.
    law = SamplingParams(temperature, seed=2, grammar=SPECS["regex"], stop_token_ids=eos())
    plain = decode(verifier(), PROMPT, law, num_tokens=12)
    text = until_end(plain)
    assert re.fullmatch(SPECS["regex"].source, text)
    length = plain.index(eos()[0]) + 1
    right = half_right(PROMPT + plain, 1, VOCAB_SIZE)
    assert decode(verifier(), PROMPT, law, right, length) == plain[:length]


def test_another_target_goes_on_with_the_text_that_is_there() -> None:
    params = constrained("seeded", "json_schema")
    plain = decode(verifier(), PROMPT, params, num_tokens=60)
    for length in (1, 7, 20, 59):
        session = Session("r", PROMPT, params, written=plain[:length])
        decode_all(verifier(), [session], [half_right(PROMPT + plain, 2, VOCAB_SIZE)], 60)
        assert session.output[:60] == plain


def test_forbidden_drafts_are_not_verified() -> None:
    params = constrained("greedy", "json_schema")
    plain = decode(verifier(), PROMPT, params, num_tokens=12)
    engine = ToyEngine(LAW, VOCAB_SIZE)
    target = verifier(engine=engine)
    session = Session("r", PROMPT, params)
    wrong = ids_of("zz")[0]
    #  nodes 0 and 2 are wrong; 1, 3 and 4 are the text, below each other
    tree = TokenTree.of([wrong, plain[0], wrong, plain[1], plain[2]], [-1, -1, 1, 1, 3])
    target.submit([session.item(tree)])
    (verdict,) = target.step().verdicts
    assert engine.last_step.num_nodes == 3
    assert verdict.path.tolist() == [1, 3, 4]
    assert verdict.token_ids.tolist() == plain[:4]


def test_a_bad_grammar_costs_its_request_alone() -> None:
    bad = replace(LAWS["greedy"], grammar=GrammarSpec("regex", "(a"))
    target = verifier()
    sessions = [Session("bad", PROMPT, bad), Session("good", PROMPT, LAWS["greedy"])]
    refused = target.submit([session.item() for session in sessions])
    assert {name: type(error) for name, error in refused.items()} == {"bad": RequestError}
    assert [verdict.request_id for verdict in target.step().verdicts] == ["good"]


def test_a_text_that_does_not_fit_its_grammar_is_refused() -> None:
    session = Session("r", PROMPT, constrained("greedy", "regex"), written=ids_of("no"))
    refused = verifier().submit([session.item()])
    assert "output token 0 is not one" in refused["r"].message


def test_a_mask_forbids_the_tokens_whose_bits_are_clear() -> None:
    rows = np.random.default_rng(0).integers(0, 2**32, (3, 3), dtype=np.uint32)
    bits = [[not (int(row[i // 32]) >> (i % 32)) & 1 for i in range(77)] for row in rows]
    assert clear_bits(rows, torch.zeros(3, 77)).tolist() == bits
