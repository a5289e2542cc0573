"""A text under a grammar grows, and its masks depend on what it is alone."""

import json
import random
import re
from dataclasses import replace

import jsonschema
import pytest

from cluster.core import TokenTree
from cluster.grammar.text import ConstrainedText
from cluster.requests.fields import GrammarSpec
from tests.support.grammar.specs import (
    SCHEMA,
    SPECS,
    VOCAB_SIZE,
    allowed,
    eos,
    ids_of,
    open_text,
    tokenizer,
)
from tests.support.matrix import strict_call


def walk_at_random(text: ConstrainedText, seed: int) -> list[int]:
    generator = random.Random(seed)
    tokens = []
    while not tokens or tokens[-1] not in eos():
        choices = sorted(allowed(text))
        # Ends are one token of very many: take them where they are offered.
        token = eos()[0] if eos()[0] in choices else generator.choice(choices)
        assert text.push(token)
        tokens.append(token)
        assert len(tokens) < 400
    return tokens


def fits(name: str, text: str) -> bool:
    match name:
        case "json_schema":
            jsonschema.validate(json.loads(text), SCHEMA)
            return True
        case "structural_tag":
            inner = text.removeprefix("<tool_call>").removesuffix("</tool_call>")
            jsonschema.validate(json.loads(inner), SCHEMA)
            return len(inner) == len(text) - 23
        case "choice":
            return text in json.loads(SPECS["choice"].source)
    pattern = {
        "regex": SPECS["regex"].source,
        "lark": "a[0-9]{1,4}b",
        "gbnf": "x[0-9][0-9]y",
    }[name]
    return re.fullmatch(pattern, text) is not None


@pytest.mark.parametrize("name", SPECS)
def test_every_walk_along_the_masks_belongs_to_the_grammar(name: str):
    for seed in range(6):
        tokens = walk_at_random(open_text(SPECS[name]), seed)
        assert tokens[-1] in eos()
        assert fits(name, tokenizer().decode(tokens[:-1]))


@pytest.mark.parametrize("name", SPECS)
def test_a_copy_goes_on_by_itself(name: str):
    spec = SPECS[name]
    tokens = walk_at_random(open_text(spec), 1)
    text, masks, copies = open_text(spec), [], []
    for token in tokens:
        masks.append(allowed(text))
        copies.append(text.copy())
        assert text.push(token)
    assert allowed(text) == set(eos())
    for length in [len(tokens) - 1, 0, 3 % len(tokens), 1]:
        assert allowed(copies[length]) == masks[length]
        assert all(map(copies[length].push, tokens[length:]))
        assert allowed(copies[length]) == set(eos())


@pytest.mark.parametrize("beside", [' {"', ' ["'])
def test_the_mask_of_a_node_is_that_of_its_path_whatever_stands_beside_it(beside: str):
    # An object of any keys: a mask was wrong once the branch beside it had been taken back.
    prefix = '<tool_call>\n{"name": "weather", "arguments": {"city": "weather", "arguments":'
    (other,) = {' {"', ' ["'} - {beside}
    tokens = [ids_of(each)[0] for each in (beside, "c", "ity", other)]
    tree = TokenTree.of(tokens, [-1, 0, 1, -1])
    text, alone = open_text(strict_call()), open_text(strict_call())
    assert all(map(text.push, ids_of(prefix)))
    assert all(map(alone.push, [*ids_of(prefix), tokens[3]]))
    *_, last = map(allowed, text.possible(tree).values())
    assert last == allowed(alone)


def test_what_the_mask_forbids_is_refused_and_changes_nothing():
    text = open_text(SPECS["regex"])
    assert all(map(text.push, ids_of("ab")))
    before = allowed(text)
    assert not any(map(text.push, {*range(0, VOCAB_SIZE, 7)} - before))
    assert not text.push(eos()[0])
    assert allowed(text) == before
    assert len(text) == len(ids_of("ab"))


def test_after_the_end_only_ends_follow():
    text = open_text(SPECS["choice"])
    assert all(map(text.push, [*ids_of("yes"), *eos(), *eos()]))
    assert allowed(text) == set(eos())
    assert not text.push(ids_of("a")[0])


def test_a_tree_has_a_mask_per_node_and_leaves_the_text_as_it_was():
    spec = SPECS["json_schema"]
    tokens = walk_at_random(open_text(spec), 3)
    text = open_text(spec)
    assert all(map(text.push, tokens[:4]))
    right = tokens[4:9]
    wrong = next(i for i in range(VOCAB_SIZE) if i not in allowed(text))
    #  the right chain, a forbidden child of the root with one of its own, and an end too soon
    tree = TokenTree.of([*right, wrong, right[0], eos()[0]], [-1, 0, 1, 2, 3, -1, 5, 0])
    expected, found = text.copy(), text.possible(tree)
    assert list(found) == [-1, 0, 1, 2, 3, 4]
    assert len(text) == 4
    for row, text in enumerate(found.values()):
        assert allowed(text) == allowed(expected)
        if row < 5:
            assert expected.push(right[row])


def test_forced_tokens_are_the_only_beginning_of_what_follows():
    text = open_text(SPECS["json_schema"])
    forced = list(text.forced())
    assert '{"name": "'.startswith(tokenizer().decode(forced))
    assert len(forced) >= 2
    assert all(map(text.push, forced))


REASONING = ids_of("</t>")


def reasoned(*, opened: bool) -> GrammarSpec:
    start = () if opened else tuple(ids_of("<"))[:1]
    return replace(SPECS["choice"], reasoning_start=start, reasoning_end=tuple(REASONING))


def test_reasoning_is_free_and_what_follows_it_is_not():
    text = open_text(reasoned(opened=True))
    for token in ids_of("anything at all"):
        assert len(allowed(text)) >= VOCAB_SIZE
        assert text.push(token)
    assert list(text.forced()) == []
    assert all(map(text.push, REASONING))
    assert allowed(text) == allowed(open_text(SPECS["choice"]))
    assert all(map(text.push, [*ids_of("yes"), *eos()]))


def test_a_text_may_leave_its_reasoning_out():
    spec = reasoned(opened=False)
    text, plain = open_text(spec), open_text(SPECS["choice"])
    assert allowed(text) == allowed(plain) | set(spec.reasoning_start)
    reasoning = text.copy()
    assert reasoning.push(spec.reasoning_start[0])
    assert len(allowed(reasoning)) >= VOCAB_SIZE
    first = ids_of("yes")[0]
    assert text.push(first)
    assert plain.push(first)
    assert allowed(text) == allowed(plain)
