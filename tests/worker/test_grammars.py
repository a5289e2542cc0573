"""Grammars are compiled beside the steps: only the requests that need them wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cluster.core import EMPTY_TREE, SamplingParams, VerifyItem, token_array
from cluster.errors import RequestError
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar_spec import GrammarSpec
from cluster.messages import VerifyFrame
from cluster.rpc.memory import memory_pair
from cluster.worker.grammars import Grammars


class Waiting:
    """A backend that compiles a grammar when the test lets it."""

    def __init__(self) -> None:
        self.go = threading.Event()

    def compile(self, spec: GrammarSpec) -> Any:
        assert self.go.wait(10)
        if spec.source == "bad":
            raise RequestError("bad", param="grammar")
        return object()


def item(name: str, source: str | None = None, base_len: int = 0) -> VerifyItem:
    grammar = None if source is None else GrammarSpec("regex", source)
    params = SamplingParams(grammar=grammar) if base_len == 0 else None
    return VerifyItem(name, 1, base_len, 0, token_array([1]), EMPTY_TREE, 1, params)


def names(frame: VerifyFrame) -> list[str]:
    return [each.request_id for each in frame.items]


class Stage:
    def __init__(self) -> None:
        self.backend = Waiting()
        self.grammars = Grammars(GrammarCompiler(lambda: self.backend, 100), 10, ())
        self.peer, link = memory_pair()
        self.link = self.grammars.gated(link)
        self.frames: AsyncIterator[VerifyFrame] = aiter(self.link)

    async def next(self) -> VerifyFrame:
        async with asyncio.timeout(10):
            return await anext(self.frames)


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    opened = Stage()
    yield opened
    opened.backend.go.set()
    await opened.link.close()


async def test_only_the_request_with_a_new_grammar_waits(stage: Stage) -> None:
    await stage.peer.send(VerifyFrame((item("a"), item("late", "x"), item("b", base_len=1))))
    assert names(await stage.next()) == ["a", "b"]
    await stage.peer.send(VerifyFrame((item("c"),), released=("old",)))
    frame = await stage.next()
    assert names(frame) == ["c"]
    assert frame.released == ("old",)
    stage.backend.go.set()
    assert names(await stage.next()) == ["late"]
    await stage.peer.send(VerifyFrame((item("again", "x"),)))
    assert names(await stage.next()) == ["again"]


async def test_a_bad_grammar_comes_through_to_be_refused(stage: Stage) -> None:
    stage.backend.go.set()
    await stage.peer.send(VerifyFrame((item("a", "bad"),)))
    frame = await stage.next()
    assert names(frame) == ["a"]
    with pytest.raises(RequestError, match="bad"):
        stage.grammars.open_hook(frame.items[0])


async def test_a_request_that_is_released_meanwhile_does_not_come(stage: Stage) -> None:
    await stage.peer.send(VerifyFrame((item("late", "x"), item("other", "y"))))
    await stage.peer.send(VerifyFrame(released=("late",)))
    assert (await stage.next()).released == ("late",)
    stage.backend.go.set()
    assert names(await stage.next()) == ["other"]


async def test_the_end_of_the_link_ends_it(stage: Stage) -> None:
    await stage.peer.send(VerifyFrame((item("late", "x"),)))
    await stage.peer.close()
    with pytest.raises(StopAsyncIteration):
        await stage.next()
