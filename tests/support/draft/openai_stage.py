"""A drafter whose engine is scripted, and the news that it waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.core import Proposal
from cluster.draft.base import DrafterContext
from cluster.draft.openai import OpenAIDrafter
from cluster.draft.openai_options import OpenAIOptions
from tests.support.draft.author import Author, grow
from tests.support.draft.scripted_engine import PATIENCE_S, Script, ScriptedEngine, scripted

DEMO = str(Path(__file__).resolve().parents[3] / "models" / "demo-target")
CONTEXT = DrafterContext("peer", 16, 4, target_model=DEMO)
WHOLE = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 4
PROMPT = "The quick brown"


class Stage:
    """A drafter whose engine is scripted, and the news that it tells of."""

    def __init__(self, engine: ScriptedEngine, **options: Any) -> None:
        self.engine = engine
        self.now = 0.0
        settings = OpenAIOptions(**{"url": engine.url, **options})
        self.drafter = OpenAIDrafter(CONTEXT, settings, lambda: self.now)
        self._news = threading.Event()
        self.drafter.wake_by(self._news.set)

    def grown(
        self, author: Author, is_enough: Callable[[Proposal], bool] = lambda found: True
    ) -> Proposal:
        """The first proposal that is enough; asked for whenever something has come."""
        while True:
            found = grow(self.drafter, author).get(author.request_id)
            if found is not None and is_enough(found):
                return found
            self.wait()

    def wait(self) -> None:
        assert self._news.wait(PATIENCE_S)
        self._news.clear()

    def settle(self, author: Author, is_so: Callable[[], bool]) -> None:
        """Ask for trees until something of the drafter's is so."""
        grow(self.drafter, author)
        while not is_so():
            self.wait()
            grow(self.drafter, author)

    def open(self, author: Author) -> None:
        self.drafter.observe([author.opening()])

    def commit(self, author: Author, token_ids: list[int]) -> None:
        self.drafter.observe([author.commit(token_ids)])


def told(caplog: pytest.LogCaptureFixture) -> str:
    """What the drafter has logged."""
    ours = [each for each in caplog.records if each.name == OpenAIDrafter.__module__]
    return "\n".join(each.getMessage() for each in ours)


@contextmanager
def stage(script: Script, **options: Any) -> Iterator[Stage]:
    with scripted(script) as engine:
        made = Stage(engine, **options)
        yield made
        made.drafter.release([request.request_id for request in made.drafter._requests])
