"""Grammars are compiled beside the steps: only the texts that need them wait."""

import asyncio
import json
import re
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, token_array
from cluster.draft.base import DrafterContext
from cluster.draft.grammar import GrammarDrafter, GrammarOptions
from cluster.errors import CapacityError, RequestError
from cluster.grammar.compiler import GrammarCompiler
from cluster.requests.fields import GrammarSpec
from cluster.rpc.messages import Open, StepFrame, TextName
from cluster.spec.penalties import clear_bits
from cluster.worker.verifier import Verifier
from tests.support.choices import by_day
from tests.support.draft.author import Author, write
from tests.support.grammar.specs import (
    SCHEMA,
    SPECS,
    VOCAB_SIZE,
    compiler,
    compiler_over,
    eos,
    ids_of,
    open_text,
    tokenizer,
)
from tests.support.worker.rounds import (
    Session,
    decode,
    decode_all,
    drafters_around,
    half_right,
)
from tests.support.worker.stage import Stage, stage, worker_of
from tests.support.worker.texts import GREEDY, opened, plain
from tests.support.worker.toy_engine import ToyEngine, hashed_law


class Waiting:
    """A library that compiles a grammar when the test lets it."""

    def __init__(self) -> None:
        self.go, self.is_asked = threading.Event(), threading.Event()

    def compile(self, spec: GrammarSpec) -> Any:
        self.is_asked.set()
        assert self.go.wait(20)
        if spec.source == "bad":
            raise RequestError("that is no grammar", param="grammar")
        return object()


def constrained(name: str, source: str, **fields: Any) -> Open:
    params = replace(GREEDY, grammar=GrammarSpec("regex", source))
    return opened(name, params=params, **fields)


@pytest.fixture
def backend() -> Waiting:
    return Waiting()


@pytest.fixture
def grammars(backend: Waiting) -> GrammarCompiler:
    return compiler_over(backend)


@pytest.fixture
async def built(backend: Waiting, grammars: GrammarCompiler) -> AsyncIterator[Stage]:
    """Its verifier has no hooks: texts run as soon as they are prepared."""
    async with stage(
        worker_of({}, prepare=lambda params: params.grammar and grammars.prepare(params.grammar))
    ) as running:
        yield running
        backend.go.set()


async def test_only_the_text_with_a_new_grammar_waits(built: Stage, backend: Waiting):
    peer = built.connect()
    await peer.open(opened("a"), constrained("late", "x"), opened("b", [7, 8]))
    await peer.until(lambda: peer.is_over("a") and peer.is_over("b"))
    assert await peer.written(opened("c")) == [plain()]
    assert not peer.verdicts["late"]
    backend.go.set()
    await peer.until(lambda: peer.is_over("late"))
    assert (peer.text("late"), peer.text("b")) == (plain(), plain([7, 8]))
    backend.go.clear()  # what is compiled waits for nothing
    assert await peer.written(constrained("again", "x")) == [plain()]


async def test_a_text_that_waits_is_named_in_heartbeats_and_another_links_grammar_too(
    built: Stage, backend: Waiting
):
    peer, other = built.connect(), built.connect()
    await peer.open(constrained("late", "x"))
    await other.open(constrained("other", "y"))
    beats = [(await each.next_beat()).heartbeat for each in (peer, other)]
    assert [beat.texts for beat in beats] == [
        (TextName("late", 1),),
        (TextName("other", 1),),
    ]


async def test_a_text_that_is_cancelled_meanwhile_does_not_come(built: Stage, backend: Waiting):
    peer = built.connect()
    await peer.open(constrained("late", "x"), constrained("other", "y"))
    await peer.send(StepFrame(cancels=(TextName("late", 1),)))
    assert await peer.written(opened("after")) == [plain()]
    backend.go.set()
    await peer.until(lambda: peer.is_over("other"))
    assert not peer.verdicts["late"]
    assert not peer.refusals["late"]


async def test_a_link_that_ends_leaves_no_text_behind(built: Stage, backend: Waiting):
    peer, other = built.connect(), built.connect()
    await peer.open(constrained("late", "x"))
    assert await asyncio.to_thread(backend.is_asked.wait, 20)
    await peer.link.close()
    await asyncio.wait({built.serving[0]})
    backend.go.set()
    assert await other.written(constrained("late", "x")) == [plain()]
    assert built.worker.is_healthy


async def test_a_bad_grammar_comes_through_to_be_refused_when_its_text_is_opened(
    grammars: GrammarCompiler, backend: Waiting
):
    backend.go.set()
    bad = GrammarSpec("regex", "bad")
    work = grammars.prepare(bad)
    with pytest.raises(RequestError, match="no grammar"):
        work.result(20)
    with pytest.raises(RequestError, match="no grammar"):
        grammars.hook(bad)


@pytest.mark.parametrize("error", [CapacityError("no", retry_after_s=1.0), ValueError("a defect")])
async def test_a_text_whose_preparing_fails_is_opened_all_the_same(error: Exception):
    """Whoever opens it meets the same error, and says it to the coordinator."""
    failed: Future[None] = Future()
    failed.set_exception(error)
    async with stage(worker_of({}, prepare=lambda each: failed)) as built:
        assert await built.connect().written(opened()) == [plain()]


# Texts under a grammar belong to it, and no draft changes them.


PROMPT = [30, 10, 40, 10, 50]
LAWS = {
    "greedy": SamplingParams(0.0),
    "seeded": SamplingParams(1.0, seed=3),
    "top_p and penalties": SamplingParams(0.8, top_p=0.9, seed=5, frequency_penalty=0.4),
}
LAW = hashed_law(VOCAB_SIZE)


def verifier(engine: ToyEngine | None = None) -> Verifier:
    return Verifier(
        engine or ToyEngine(LAW, VOCAB_SIZE),
        open_hook=lambda text: compiler().hook(text.params.grammar),
    )


def held_to(law: str, name: str) -> SamplingParams:
    # A random law hardly ever ends a text by itself.
    bias = tuple((token, 30.0) for token in [*eos(), *ids_of('"')])
    return replace(LAWS[law], grammar=SPECS[name], stop_token_ids=eos(), logit_bias=bias)


def until_end(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens[: tokens.index(eos()[0])]))


@pytest.mark.parametrize("name", ["json_schema", "regex"])
@pytest.mark.parametrize("law", LAWS)
def test_no_tree_changes_the_text(name: str, law: str):
    params = held_to(law, name)
    plain = decode(verifier(), PROMPT, params, num_tokens=100)
    if name == "json_schema":
        jsonschema.validate(json.loads(until_end(plain)), SCHEMA)
    length = plain.index(eos()[0]) + 1
    for drafter in drafters_around(PROMPT + plain, VOCAB_SIZE, by_day(1, 3)):
        assert decode(verifier(), PROMPT, params, drafter, length) == plain[:length]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_text_that_nothing_else_adjusts_belongs_to_its_grammar(temperature: float):
    # Such rows are masked within the native draw, where there is one.
    law = SamplingParams(temperature, seed=2, grammar=SPECS["regex"], stop_token_ids=eos())
    plain = decode(verifier(), PROMPT, law, num_tokens=12)
    text = until_end(plain)
    assert re.fullmatch(SPECS["regex"].source, text)
    length = plain.index(eos()[0]) + 1
    right = half_right(PROMPT + plain, 1, VOCAB_SIZE)
    assert decode(verifier(), PROMPT, law, right, length) == plain[:length]


def test_another_target_goes_on_with_the_text_that_is_there():
    params = held_to("seeded", "json_schema")
    plain = decode(verifier(), PROMPT, params, num_tokens=60)
    for length in (1, 7, 20, 59):
        session = Session("r", PROMPT, params, written=plain[:length])
        decode_all(verifier(), [session], [half_right(PROMPT + plain, 2, VOCAB_SIZE)], 60)
        assert session.output[:60] == plain


def test_forbidden_drafts_are_not_verified():
    params = held_to("greedy", "json_schema")
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


def test_a_bad_grammar_costs_its_request_alone():
    bad = replace(LAWS["greedy"], grammar=GrammarSpec("regex", "(a"))
    target = verifier()
    sessions = [Session("bad", PROMPT, bad), Session("good", PROMPT, LAWS["greedy"])]
    refused = target.submit([session.item() for session in sessions])
    assert {name: type(error) for name, error in refused.items()} == {"bad": RequestError}
    assert [verdict.request_id for verdict in target.step().verdicts] == ["good"]


def test_a_text_that_does_not_fit_its_grammar_is_refused():
    session = Session("r", PROMPT, held_to("greedy", "regex"), written=ids_of("no"))
    refused = verifier().submit([session.item()])
    assert "output token 0 is not one" in refused["r"].message


def test_a_mask_forbids_the_tokens_whose_bits_are_clear():
    rows = np.random.default_rng(0).integers(0, 2**32, (3, 3), dtype=np.uint32)
    bits = [[not (int(row[i // 32]) >> (i % 32)) & 1 for i in range(77)] for row in rows]
    assert clear_bits(rows, torch.zeros(3, 77)).tolist() == bits


# A grammar that takes too much work to go on: the request ends with the library's own reason.


# Endless text is forced, and the library follows it for so long as its limit allows.  It comes
# behind so much other text that the grammar is not refused at once.
BEGUN = "bcdefghijklmnopqrst"
ENDLESS = GrammarSpec("grammar", f'root ::= "{BEGUN}" [b-z] end\nend ::= "a" end')
PARAMS = SamplingParams(0.0, grammar=ENDLESS)


def test_a_text_tells_the_reason_when_it_cannot_grow():
    text = open_text(ENDLESS)
    assert all(map(text.push, ids_of(BEGUN + "x")))
    text.forced()
    for _ in range(2):  # it stays so
        with pytest.raises(RequestError, match=r"cannot be used: .*Too many items") as caught:
            text.push(ids_of("a")[0])
        assert caught.value.param == "grammar"
        assert "non-verbose" not in caught.value.message


@pytest.mark.parametrize(
    ("tree", "is_ahead"),
    [(EMPTY_TREE, False), (EMPTY_TREE, True), (TokenTree.chain(ids_of("a")), False)],
)
def test_its_request_is_refused_and_nothing_is_said_of_resuming(tree: TokenTree, is_ahead: bool):
    target, session = verifier(), Session("r", PROMPT, PARAMS)
    refused = {}
    for _ in range(len(BEGUN) + 4):
        if not target.ahead:
            refused |= target.submit([session.item(tree)])
        frame = target.step([session.record] * is_ahead)
        refused |= frame.refused
        if refused:
            break
        session.take(frame.verdicts[0])
    assert isinstance(refused["r"], RequestError)
    assert "Too many items" in refused["r"].message
    assert "resume" not in refused["r"].message


def test_a_text_that_uses_its_grammar_up_tells_the_reason_and_the_next_begins_anew():
    """It says no to a token as to one that is forbidden, where it has given up."""
    large = "/.*a.{14}/ & /.*b.{15}/ & /.*c.{13}/"
    spec = GrammarSpec("grammar", f"start: A B\nA: /[b-z]{{90}}/\nB: {large}")
    written = token_array(ids_of(30 * "bcd" + 12 * "abc"))
    with pytest.raises(RequestError, match="it is too large") as caught:
        compiler().hook(spec).extend(written)
    assert "resume" not in caught.value.message
    # The library's texts of one grammar share what it has found; the next one begins anew.
    compiler().hook(spec).extend(written)


def test_the_drafter_of_forced_tokens_falls_silent():
    context = DrafterContext("grammar", 8, 8, open_text=open_text)
    ours, author = GrammarDrafter(context, GrammarOptions()), Author(PROMPT, PARAMS)
    assert write(ours, author, []) is not None
    assert write(ours, author, ids_of("a")) is None
