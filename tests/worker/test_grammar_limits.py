"""A grammar that takes too much work to go on: the request ends with the library's own reason."""

from __future__ import annotations

import pytest

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.grammar import GrammarDrafter, GrammarOptions
from cluster.errors import DrafthouseError, RequestError
from cluster.requests.fields import GrammarSpec
from cluster.worker.target_parts import GrammarHook, Grammars
from tests.support.draft.author import Author, write
from tests.support.grammar.specs import VOCAB_SIZE, compiler, eos, ids_of, open_text
from tests.support.worker.rounds import Session
from tests.worker.test_grammar_hook import PROMPT, verifier

# Endless text is forced, and the library follows it for so long as its limit allows.  It comes
# behind so much other text that the grammar is not refused at once.
BEGUN = "bcdefghijklmnopqrst"
ENDLESS = GrammarSpec("grammar", f'root ::= "{BEGUN}" [b-z] end\nend ::= "a" end')
PARAMS = SamplingParams(0.0, grammar=ENDLESS)


def test_a_text_tells_the_reason_when_it_cannot_grow() -> None:
    text = open_text(ENDLESS)
    assert all(map(text.push, ids_of(BEGUN + "x")))
    text.forced()
    for _ in range(2):  # it stays so
        with pytest.raises(RequestError, match=r"cannot be used: .*Too many items") as caught:
            text.push(ids_of("a")[0])
        assert caught.value.param == "grammar"
        assert "non-verbose" not in caught.value.message


@pytest.mark.parametrize("tree", [EMPTY_TREE, TokenTree.chain(ids_of("a"))], ids=["plain", "draft"])
def test_its_request_is_refused_and_nothing_is_said_of_resuming(tree: TokenTree) -> None:
    target, session = verifier(), Session("r", PROMPT, PARAMS)
    refused: dict[str, DrafthouseError] = {}
    for _ in range(len(BEGUN) + 4):
        refused |= target.submit([session.item(tree)])
        frame = target.step()
        refused |= frame.refused
        if refused:
            break
        session.take(frame.verdicts[0])
    assert isinstance(refused["r"], RequestError)
    assert "Too many items" in refused["r"].message
    assert "resume" not in refused["r"].message


def test_a_text_that_uses_its_grammar_up_tells_the_reason_and_the_next_begins_anew() -> None:
    """It says no to a token as to one that is forbidden, where it has given up."""
    large = "/.*a.{14}/ & /.*b.{15}/ & /.*c.{13}/"
    spec = GrammarSpec("grammar", f"start: A B\nA: /[b-z]{{90}}/\nB: {large}")
    grammars = Grammars(compiler(), VOCAB_SIZE, eos())
    written = token_array(ids_of(30 * "bcd" + 12 * "abc"))
    with pytest.raises(RequestError, match="it is too large") as caught:
        GrammarHook(grammars.text(spec)).extend(written)
    assert "resume" not in caught.value.message
    # The library's texts of one grammar share what it has found; the next one begins anew.
    GrammarHook(grammars.text(spec)).extend(written)


def test_the_drafter_of_forced_tokens_falls_silent() -> None:
    context = DrafterContext("grammar", 8, 8, open_text=open_text)
    ours, author = GrammarDrafter(context, GrammarOptions()), Author(PROMPT, PARAMS)
    assert write(ours, author, []) is not None
    assert write(ours, author, ids_of("a")) is None
