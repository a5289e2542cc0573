"""Grammars are compiled beside the steps: only the texts that need them wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import pytest

from cluster.errors import CapacityError, RequestError
from cluster.grammar.compiler import GrammarCompiler
from cluster.messages import Open, StepFrame, TextName
from cluster.requests.fields import GrammarSpec
from cluster.worker.target_parts import Grammars
from tests.support.worker.rounds import Session
from tests.support.worker.stage import Stage, stage, worker_of
from tests.support.worker.texts import GREEDY, opened, plain


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
def grammars(backend: Waiting) -> Grammars:
    return Grammars(GrammarCompiler(lambda: backend, 100), 10, ())


@pytest.fixture
async def built(backend: Waiting, grammars: Grammars) -> AsyncIterator[Stage]:
    """Its verifier has no hooks: texts run as soon as they are prepared."""
    async with stage(worker_of({}, prepare=grammars.prepare)) as running:
        yield running
        backend.go.set()


async def test_only_the_text_with_a_new_grammar_waits(built: Stage, backend: Waiting) -> None:
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
) -> None:
    peer, other = built.connect(), built.connect()
    await peer.open(constrained("late", "x"))
    await other.open(constrained("other", "y"))
    beats = [(await each.next_beat()).heartbeat for each in (peer, other)]
    assert [beat.texts for beat in beats if beat] == [
        (TextName("late", 1),),
        (TextName("other", 1),),
    ]


async def test_a_text_that_is_cancelled_meanwhile_does_not_come(
    built: Stage, backend: Waiting
) -> None:
    peer = built.connect()
    await peer.open(constrained("late", "x"), constrained("other", "y"))
    await peer.send(StepFrame(cancels=(TextName("late", 1),)))
    assert await peer.written(opened("after")) == [plain()]
    backend.go.set()
    await peer.until(lambda: peer.is_over("other"))
    assert not peer.verdicts["late"]
    assert not peer.refusals["late"]


async def test_a_link_that_ends_leaves_no_text_behind(built: Stage, backend: Waiting) -> None:
    peer, other = built.connect(), built.connect()
    await peer.open(constrained("late", "x"))
    assert await asyncio.to_thread(backend.is_asked.wait, 20)
    await peer.link.close()
    await asyncio.wait({built.serving[0]})
    backend.go.set()
    assert await other.written(constrained("late", "x")) == [plain()]
    assert built.worker.is_healthy


async def test_a_bad_grammar_comes_through_to_be_refused_when_its_text_is_opened(
    grammars: Grammars, backend: Waiting
) -> None:
    backend.go.set()
    bad = constrained("a", "bad")
    work = grammars.prepare(bad)
    assert work is not None
    with pytest.raises(RequestError, match="no grammar"):
        work.result(20)
    with pytest.raises(RequestError, match="no grammar"):
        grammars.open_hook(Session("a", [1], bad.params).record)


@pytest.mark.parametrize("error", [CapacityError("no", retry_after_s=1.0), ValueError("a defect")])
async def test_a_text_whose_preparing_fails_is_opened_all_the_same(error: Exception) -> None:
    """Whoever opens it meets the same error, and says it to the coordinator."""
    failed: Future[None] = Future()
    failed.set_exception(error)
    async with stage(worker_of({}, prepare=lambda each: failed)) as built:
        assert await built.connect().written(opened()) == [plain()]
