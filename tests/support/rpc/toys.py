"""Workers with fixed behaviour, for tests over real streams."""

import asyncio
import itertools
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from cluster.core import (
    FinishReason,
    Observation,
    TokenEvent,
    token_array,
)
from cluster.errors import DrafthouseError
from cluster.plan.texts import NO_SOURCES
from cluster.rpc.link import Link
from cluster.rpc.messages import (
    EventFrame,
    Open,
    ProposalFrame,
    TextVerdict,
    VerdictFrame,
    WorkerDescription,
)
from cluster.rpc.server import RunningServer

TARGET = WorkerDescription("w-1", "target", "toy", tokenizer_hash="a" * 8, vocab_size=100)


class EchoTarget:
    """Says each text's last token once more; records how its links ended."""

    def __init__(self, description: WorkerDescription = TARGET) -> None:
        self.description = description
        self.endings: asyncio.Queue[str] = asyncio.Queue()
        self.cancelled = []

    def describe(self) -> WorkerDescription:
        return self.description

    async def serve(self, link: Link[Any, Any]) -> None:
        try:
            async for frame in link:
                self.cancelled.extend(name.request_id for name in frame.cancels)
                await link.send(VerdictFrame(tuple(map(self._verdict, frame.opens))))
            self.endings.put_nowait("closed")
        except DrafthouseError as error:
            self.endings.put_nowait(error.code)

    def _verdict(self, opened: Open) -> TextVerdict:
        last, length = token_array(opened.token_ids[-1:]), len(opened.token_ids)
        return TextVerdict(opened.request_id, opened.generation, length, last, NO_SOURCES)


class HangingTarget(EchoTarget):
    """Accepts links and never reads from them."""

    async def serve(self, link: Link[Any, Any]) -> None:
        await asyncio.Event().wait()


class LeavingTarget(EchoTarget):
    """Answers the first frame, closes the link and returns."""

    async def serve(self, link: Link[Any, Any]) -> None:
        async for frame in link:
            await link.send(VerdictFrame(tuple(map(self._verdict, frame.opens))))
            await link.close()


class FailingTarget(EchoTarget):
    """Raises on the first frame."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def serve(self, link: Link[Any, Any]) -> None:
        async for _ in link:
            raise self.error


class EchoDrafter:
    """Observes every commit and proposes nothing."""

    def describe(self) -> WorkerDescription:
        return WorkerDescription("d-1", "drafter", "counts")

    async def serve(self, link: Link[Any, Any]) -> None:
        async for frame in link:
            observations = tuple(
                Observation(
                    commit.request_id, commit.generation, commit.base_len + len(commit.token_ids)
                )
                for commit in frame.commits
            )
            await link.send(ProposalFrame(observations=observations))


class EchoCoordinator:
    """Answers each request with its own prompt."""

    def __init__(self) -> None:
        self.left = asyncio.Event()  # a watcher has

    def describe(self) -> WorkerDescription:
        return replace(TARGET, worker_id="c-1", role="coordinator")

    async def serve(self, link: Link[Any, Any]) -> None:
        async for frame in link:
            events = tuple(
                TokenEvent(request.id, 0, request.prompt_ids, finish_reason=FinishReason.STOP)
                for request in frame.requests
            )
            await link.send(EventFrame(events))

    def render_metrics(self) -> bytes:
        return b"drafthouse_running_requests 0\n"

    def status(self) -> Mapping[str, Any]:
        return {"targets": ["w-1"], "running": 0}

    async def watch(self) -> AsyncGenerator[tuple[str, str], None]:
        """Count for ever."""
        try:
            for number in itertools.count():
                yield "rounds", str(number)
                await asyncio.sleep(0)
        finally:
            self.left.set()


@asynccontextmanager
async def stopping(server: RunningServer) -> AsyncIterator[RunningServer]:
    """The server, stopped at the end in every case."""
    try:
        yield server
    finally:
        await server.stop(0.0)
