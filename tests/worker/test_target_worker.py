"""The target's process body: one engine thread, links with leases, contained failures."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from cluster.core import EMPTY_TREE, SamplingParams, TokenTree, VerifyItem, token_array
from cluster.engine.work import Output
from cluster.errors import WorkerError
from cluster.messages import InHand, VerdictFrame, VerifyFrame, WorkerDescription
from cluster.rpc.memory import MemoryLink, memory_pair
from cluster.token_log import prefix_hash
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Verifier
from tests.support.worker.toy_engine import ToyEngine, hashed_law

VOCAB_SIZE = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=64)
DESCRIPTION = WorkerDescription("w", "target", "toy", vocab_size=VOCAB_SIZE)


class FragileEngine(ToyEngine):
    """Raises what `failures` holds, one per step, and whenever a work brings `poison`."""

    def __init__(self) -> None:
        super().__init__(hashed_law(VOCAB_SIZE), VOCAB_SIZE)
        self.failures: list[Exception] = []
        self.poison: list[int] = []
        self.stepping = threading.Event()
        self.gate = threading.Event()  # cleared, it holds steps up
        self.gate.set()

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        self.stepping.set()
        self.gate.wait(10)
        if self.failures:
            raise self.failures.pop(0)
        if any(self.poison == work.delta.tolist() for work in self._queue.values()):
            raise ValueError("poison")
        return super().step()


@dataclass
class Stage:
    engine: FragileEngine
    worker: TargetWorker
    serving: list[asyncio.Task[None]] = field(default_factory=list)

    def connect(self) -> MemoryLink[Any, Any]:
        ours, theirs = memory_pair()
        self.serving.append(asyncio.create_task(self.worker.serve(theirs)))
        return ours

    async def settled(self) -> VerdictFrame:
        """A report that the worker gives after everything that arrived before."""
        link = self.connect()
        await link.send(VerifyFrame(released=("none",)))
        async with asyncio.timeout(10):
            return await anext(link)


@asynccontextmanager
async def stage() -> AsyncIterator[Stage]:
    engine = FragileEngine()
    worker = TargetWorker(Verifier(engine), DESCRIPTION)
    worker.start()
    built = Stage(engine, worker)
    try:
        yield built
    finally:
        for task in built.serving:
            task.cancel()
        await asyncio.gather(*built.serving, return_exceptions=True)
        await asyncio.to_thread(worker.stop)


def item(
    name: str, context: Sequence[int], base_len: int = 0, tree: TokenTree = EMPTY_TREE
) -> VerifyItem:
    return VerifyItem(
        name, 1, base_len, prefix_hash(context[:base_len]), token_array(context[base_len:]), tree,
        2, GREEDY if base_len == 0 else None,
    )  # fmt: skip


async def ask(link: MemoryLink[Any, Any], frame: VerifyFrame) -> VerdictFrame:
    await link.send(frame)
    async with asyncio.timeout(10):
        while True:
            answer = await anext(link)
            if answer.verdicts or answer.misses or answer.refusals:
                return answer


async def decode(link: MemoryLink[Any, Any], name: str, prompt: list[int], count: int) -> list[int]:
    context, base_len = list(prompt), 0
    while len(context) < len(prompt) + count:
        answer = await ask(link, VerifyFrame((item(name, context, base_len),)))
        base_len = len(context)
        context += answer.verdicts[0].token_ids.tolist()
    return context[len(prompt) :]


def greedy(prompt: list[int], count: int) -> list[int]:
    law, context = hashed_law(VOCAB_SIZE), list(prompt)
    for _ in range(count):
        context.append(int(np.argmax(law(context))))
    return context[len(prompt) :]


async def test_a_link_decodes_step_by_step() -> None:
    async with stage() as built:
        assert await decode(built.connect(), "r", [1, 2], 12) == greedy([1, 2], 12)


async def test_two_links_may_use_the_same_request_id() -> None:
    async with stage() as built:
        links = [built.connect(), built.connect()]
        texts = await asyncio.gather(
            *(decode(link, "r", [i, 5], 10) for i, link in enumerate(links))
        )
    assert texts == [greedy([i, 5], 10) for i in range(2)]


async def steps_of(built: Stage, frames: Sequence[VerifyFrame]) -> list[list[str]]:
    """The requests of each step that answers these frames, which arrive during another step."""
    link = built.connect()
    built.engine.gate.clear()
    await link.send(VerifyFrame((item("first", [7, 7]),)))
    await asyncio.to_thread(built.engine.stepping.wait, 10)
    for frame in frames:
        await link.send(frame)
    await asyncio.sleep(0.05)
    built.engine.gate.set()
    found: list[list[str]] = []
    async with asyncio.timeout(10):
        while sum(map(len, found)) < 1 + sum(len(frame.items) for frame in frames):
            answer = await anext(link)
            found.append([verdict.request_id for verdict in answer.verdicts])
    return found[1:]


async def test_frames_that_arrive_during_a_step_share_the_next_unless_they_are_apart() -> None:
    frames = [VerifyFrame((item(name, [1, 3]),)) for name in "abcd"]
    apart = [frames[0], frames[1], replace(frames[2], is_apart=True), frames[3]]
    async with stage() as built:
        assert await steps_of(built, frames) == [["a", "b", "c", "d"]]
    async with stage() as built:
        assert await steps_of(built, apart) == [["a", "b"], ["c", "d"]]


async def test_the_items_of_a_frame_run_as_one_step() -> None:
    async with stage() as built:
        items = tuple(item(f"r{i}", [i, 3]) for i in range(5))
        answer = await ask(built.connect(), VerifyFrame(items))
    assert [verdict.request_id for verdict in answer.verdicts] == [f"r{i}" for i in range(5)]
    assert answer.report is not None
    assert answer.report.num_sequences == 5


async def test_accepted_drafts_are_reported_with_their_path() -> None:
    text = greedy([1, 2], 3)
    async with stage() as built:
        tree = TokenTree.chain([text[0], text[1], (text[2] + 1) % VOCAB_SIZE])
        answer = await ask(built.connect(), VerifyFrame((item("r", [1, 2], tree=tree),)))
    assert answer.verdicts[0].path.tolist() == [0, 1]
    assert answer.verdicts[0].token_ids.tolist() == text


async def test_a_doubled_frame_is_answered_once() -> None:
    async with stage() as built:
        link = built.connect()
        frame = VerifyFrame((item("r", [1, 2]),))
        await link.send(frame)
        await link.send(frame)
        first = await anext(link)
        assert len(first.verdicts) == 1
        context = [1, 2, int(first.verdicts[0].token_ids[0])]
        # Either it was dropped while the first was pending, or it has been computed once more.
        answer = await ask(link, VerifyFrame((item("r", context, 2),)))
        while answer.verdicts[0].context_len == 2:
            answer = await anext(link)
        assert answer.verdicts[0].token_ids.tolist() == greedy(context, 1)


async def test_released_requests_are_freed_and_reported_without_a_step() -> None:
    async with stage() as built:
        link = built.connect()
        await decode(link, "r", [1, 2], 3)
        await link.send(VerifyFrame(released=("r",)))
        async with asyncio.timeout(10):
            answer = await anext(link)
        assert built.engine.contexts == {}
        assert answer.report is not None
        assert answer.report.pages_in_use == 0
        assert answer.report.num_sequences == 0


async def test_a_link_that_ends_frees_its_requests_and_no_others() -> None:
    async with stage() as built:
        lost, kept = built.connect(), built.connect()
        await decode(lost, "r", [1, 2], 3)
        await decode(kept, "r", [3, 4], 3)
        lost.sever()
        await asyncio.wait({built.serving[0]})
        await built.settled()
        assert list(built.engine.contexts.values()) == [[3, 4, *greedy([3, 4], 2)]]


async def test_a_released_request_that_is_asked_for_again_must_be_sent_whole() -> None:
    async with stage() as built:
        link = built.connect()
        await decode(link, "r", [1, 2], 3)
        answer = await ask(link, VerifyFrame((item("r", [1, 2, 3], 2),), released=("r",)))
        assert answer.misses[0].have_len == 0
        assert await decode(link, "r", [1, 2], 3) == greedy([1, 2], 3)


async def test_a_step_that_raises_refuses_its_only_item_and_the_worker_goes_on() -> None:
    async with stage() as built:
        link = built.connect()
        built.engine.failures.append(ValueError("out of luck"))
        answer = await ask(link, VerifyFrame((item("r", [1, 2]),)))
        assert [refusal.code for refusal in answer.refusals] == [WorkerError.code]
        assert "out of luck" not in answer.refusals[0].message
        assert built.worker.healthy
        assert await decode(link, "r", [1, 2], 3) == greedy([1, 2], 3)


async def test_an_item_that_makes_every_step_raise_is_refused_alone() -> None:
    async with stage() as built:
        link, other = built.connect(), built.connect()
        built.engine.poison = [1, 31]
        decoding = asyncio.create_task(decode(other, "s", [3, 4], 40))
        for _ in range(5):
            answer = await ask(link, VerifyFrame((item("good", [5, 6]), item("bad", [1, 31]))))
            outcomes = [("verdict", verdict.request_id) for verdict in answer.verdicts]
            outcomes += [("refusal", refusal.request_id) for refusal in answer.refusals]
            if len(outcomes) < 2:
                answer = await ask(link, VerifyFrame())
                outcomes += [("verdict", verdict.request_id) for verdict in answer.verdicts]
                outcomes += [("refusal", refusal.request_id) for refusal in answer.refusals]
            assert sorted(outcomes) == [("refusal", "bad"), ("verdict", "good")]
            await link.send(VerifyFrame(released=("good", "bad")))
        assert built.worker.healthy
        async with asyncio.timeout(10):
            assert await decoding == greedy([3, 4], 40)


async def test_requests_that_lost_their_cache_to_a_failed_step_are_asked_for_again() -> None:
    async with stage() as built:
        link = built.connect()
        contexts = {"r": [1, 2], "s": [3, 4]}
        for name, context in contexts.items():
            contexts[name] = context + await decode(link, name, context, 1)
        built.engine.failures.append(ValueError("a batch that cannot be"))
        frame = VerifyFrame(tuple(item(name, context, 2) for name, context in contexts.items()))
        missed = set[str]()
        await link.send(frame)
        async with asyncio.timeout(10):
            while len(missed) < 2:
                missed |= {miss.request_id for miss in (await anext(link)).misses}
        answer = await ask(link, VerifyFrame((item("r", contexts["r"]),)))
        assert contexts["r"] + answer.verdicts[0].token_ids.tolist() == [1, 2, *greedy([1, 2], 2)]


@pytest.mark.parametrize(
    "failures",
    [[WorkerError("a rank is gone")], [ValueError("a"), ValueError("b"), ValueError("c")]],
    ids=["engine-lost", "three-in-a-row"],
)
async def test_a_broken_engine_ends_every_link_and_reports_unhealthy(
    failures: list[Exception],
) -> None:
    async with stage() as built:
        link, idle = built.connect(), built.connect()
        await built.settled()
        built.engine.failures.extend(failures)
        for name in "rst"[: len(failures)]:
            await link.send(VerifyFrame((item(name, [1, 2]),)))
            if len(built.engine.failures) > 1:
                await anext(link)
        with pytest.raises(WorkerError):
            await asyncio.wait_for(built.serving[0], 10)
        with pytest.raises(WorkerError):
            await asyncio.wait_for(built.serving[1], 10)
        assert not built.worker.healthy
        with pytest.raises(WorkerError):
            await built.worker.serve(idle)


async def test_a_malformed_item_is_refused_alone() -> None:
    async with stage() as built:
        bad = item("bad", [1, 99])
        answer = await ask(built.connect(), VerifyFrame((bad,)))
        assert answer.refusals[0].request_id == "bad"
        assert await decode(built.connect(), "r", [1, 2], 3) == greedy([1, 2], 3)


async def test_stopping_ends_the_thread() -> None:
    async with stage() as built:
        await decode(built.connect(), "r", [1, 2], 2)
        await asyncio.to_thread(built.worker.stop)
        assert not built.worker.healthy


async def test_what_is_in_hand_is_named_while_a_step_lasts_and_not_afterwards() -> None:
    async with stage() as built:
        link, other = built.connect(), built.connect()
        built.engine.gate.clear()
        await link.send(VerifyFrame((item("computed", [1, 2]),)))
        await asyncio.to_thread(built.engine.stepping.wait, 10)
        await link.send(VerifyFrame((item("queued", [1, 2]),)))
        await other.send(VerifyFrame((item("elsewhere", [1, 2]),)))
        async with asyncio.timeout(10):
            named = await anext(link)
            assert named.is_heartbeat
            assert named.in_hand == (InHand("computed", 1), InHand("queued", 1))
            assert (await anext(other)).in_hand == (InHand("elsewhere", 1),)
            built.engine.gate.set()
            answered: set[str] = set()
            while len(answered) < 2:
                answered |= {verdict.request_id for verdict in (await anext(link)).verdicts}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await anext(link)
