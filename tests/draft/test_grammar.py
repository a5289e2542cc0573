"""The grammar drafter proposes what must follow, and nothing else."""

import json
from dataclasses import replace

from cluster.core import SamplingParams
from cluster.draft.base import DrafterContext
from cluster.draft.grammar import GrammarDrafter, GrammarOptions
from cluster.requests.fields import GrammarSpec
from tests.support.draft.author import Author, write
from tests.support.grammar.specs import SPECS, eos, ids_of, open_text, tokenizer

PROMPT = [40, 50, 60]
PARAMS = SamplingParams(0.0, max_tokens=100, grammar=SPECS["json_schema"])


def drafter() -> GrammarDrafter:
    return GrammarDrafter(DrafterContext("grammar", 64, 8, open_text=open_text), GrammarOptions())


def test_forced_tokens_come_with_survival_one():
    ours, author = drafter(), Author(PROMPT, PARAMS)
    proposal = write(ours, author, [])
    assert proposal.is_complete
    assert proposal.survival.tolist() == [1.0] * len(proposal.tree)
    assert '{"name": "'.startswith(tokenizer().decode(proposal.tree.token_ids.tolist()))
    text = ids_of('{"name": "ab", ')
    proposal = write(ours, author, text)
    assert proposal.base_len == len(PROMPT) + len(text)
    assert '"kind": "'.startswith(tokenizer().decode(proposal.tree.token_ids.tolist()))


def test_nothing_is_drafted_where_the_model_has_a_choice():
    ours, author = drafter(), Author(PROMPT, PARAMS)
    write(ours, author, [])
    assert write(ours, author, ids_of('{"name": "a')) is None


def test_a_text_without_a_grammar_gets_nothing():
    assert write(drafter(), Author(PROMPT, replace(PARAMS, grammar=None)), []) is None


def test_a_text_that_was_cut_is_followed():
    ours, author = drafter(), Author(PROMPT, PARAMS)
    write(ours, author, [])
    write(ours, author, ids_of('{"name": "ab", "kind": "'))
    del author.tokens[len(PROMPT) :]
    ours.observe([author.commit_of(0)])
    again = write(ours, author, ids_of("{"))
    assert "{" + tokenizer().decode(again.tree.token_ids.tolist()) in '{"name": "'


def test_after_the_end_and_after_what_does_not_fit_nothing_follows():
    params = replace(PARAMS, grammar=GrammarSpec("choice", json.dumps(["yes", "no"])))
    for output in ([*ids_of("yes"), *eos()], ids_of("what")):
        ours, author = drafter(), Author(PROMPT, params)
        write(ours, author, [])
        assert write(ours, author, output) is None
        assert write(ours, author, ids_of("y")) is None
