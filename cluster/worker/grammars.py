"""The grammars of a target worker: compiled beside its steps, and hooked into its draws."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from cluster.core import VerifyItem
from cluster.errors import DrafthouseError
from cluster.grammar.compiler import GrammarCompiler
from cluster.grammar.text import ConstrainedText
from cluster.grammar_spec import GrammarSpec
from cluster.messages import VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.link import Link
from cluster.worker.grammar_hook import GrammarHook
from cluster.worker.residents import Residents
from cluster.worker.target import StepVerifier, TargetWorker

TargetLink = Link[VerdictFrame, VerifyFrame]


class Grammars:
    """What the verifier and the links of one target share."""

    def __init__(
        self, compiler: GrammarCompiler, vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        self.compiler = compiler
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._masks: Executor = ThreadPoolExecutor(1, "grammar-masks")
        self._compiling: Executor = ThreadPoolExecutor(1, "grammar-compile")

    def open_hook(self, item: VerifyItem) -> GrammarHook | None:
        """The hook of the request that `item` opens; None without a grammar.

        Raises RequestError with the reason where its grammar cannot be used.
        """
        spec = None if item.params is None else item.params.grammar
        if spec is None:
            return None
        return GrammarHook(self.text(spec), item.prompt_len, self._masks)

    def text(self, spec: GrammarSpec) -> ConstrainedText:
        """A text under that grammar, which has not begun.  Raises RequestError as above."""
        grammar = self.compiler.compile(spec)
        return ConstrainedText(grammar, spec, self._eos_token_ids, self._vocab_size)

    def gated(self, link: TargetLink) -> TargetLink:
        """`link`, from which items come when their grammars are compiled."""
        return _GatedLink(link, self._is_late, self._compile)

    def _is_late(self, item: VerifyItem) -> bool:
        spec = None if item.params is None else item.params.grammar
        return spec is not None and not self.compiler.is_ready(spec)

    async def _compile(self, item: VerifyItem) -> None:
        assert item.params is not None
        assert item.params.grammar is not None
        with contextlib.suppress(DrafthouseError):  # opening the request raises it again
            await asyncio.get_running_loop().run_in_executor(
                self._compiling, self.compiler.compile, item.params.grammar
            )


class GrammarTargetWorker(TargetWorker):
    """A target worker for whose steps no grammar is compiled while they wait."""

    def __init__(
        self,
        verifier: StepVerifier,
        description: WorkerDescription,
        residents: Residents,
        grammars: Grammars,
    ) -> None:
        super().__init__(verifier, description, residents)
        self._grammars = grammars

    async def serve(self, link: TargetLink) -> None:
        """See `TargetWorker.serve`."""
        await super().serve(self._grammars.gated(link))


class _GatedLink:
    """A link whose late items come by themselves, each when it is prepared; all else at once."""

    def __init__(
        self,
        link: TargetLink,
        is_late: Callable[[VerifyItem], bool],
        prepare: Callable[[VerifyItem], Coroutine[None, None, None]],
    ) -> None:
        self._link = link
        self._is_late = is_late
        self._prepare = prepare
        self._late: dict[str, tuple[VerifyItem, asyncio.Task[None]]] = {}

    async def send(self, message: VerdictFrame) -> None:
        await self._link.send(message)

    async def close(self) -> None:
        for request_id in list(self._late):
            self._drop(request_id)
        await self._link.close()

    async def __aiter__(self) -> AsyncIterator[VerifyFrame]:
        frames = aiter(self._link)
        coming: asyncio.Future[VerifyFrame | None] | None = None
        try:
            while True:
                if not self._late and coming is None:
                    frame = await anext(frames, None)
                else:
                    coming = coming or asyncio.ensure_future(_next(frames))
                    awaited: list[asyncio.Future[Any]] = [coming]
                    awaited += [task for _, task in self._late.values()]
                    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
                    for item in self._take_ready():
                        yield VerifyFrame((item,))
                    if not coming.done():
                        continue
                    frame, coming = coming.result(), None
                if frame is None:
                    return
                passed = self._hold_late(frame)
                if passed is not None:
                    yield passed
        finally:
            if coming is not None:
                coming.cancel()

    def _hold_late(self, frame: VerifyFrame) -> VerifyFrame | None:
        """What is left of a frame without its late items; None = nothing."""
        for request_id in frame.released:
            self._drop(request_id)
        late = [item for item in frame.items if self._is_late(item)]
        if not late:
            return frame
        for item in late:
            self._drop(item.request_id)
            self._late[item.request_id] = item, asyncio.ensure_future(self._prepare(item))
        rest = tuple(item for item in frame.items if item not in late)
        return replace(frame, items=rest) if rest or frame.released else None

    def _take_ready(self) -> list[VerifyItem]:
        ready = [item for item, task in self._late.values() if task.done()]
        for item in ready:
            del self._late[item.request_id]
        return ready

    def _drop(self, request_id: str) -> None:
        held = self._late.pop(request_id, None)
        if held is not None:
            held[1].cancel()


async def _next(frames: AsyncIterator[VerifyFrame]) -> VerifyFrame | None:
    return await anext(frames, None)
