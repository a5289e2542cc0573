"""The target's process body: one engine thread, and links of which each ends by itself."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from cluster import metrics
from cluster.core import Proposal
from cluster.draft.base import DraftTask
from cluster.engine.work import Output
from cluster.errors import WorkerError
from cluster.rpc.messages import AdapterList, Heartbeat, Load, StepFrame, TextName
from tests.support.worker.residents import GreedyOracle
from tests.support.worker.stage import Stage, stage, worker_of
from tests.support.worker.texts import GREEDY, opened, plain
from tests.support.worker.toy_engine import ToyEngine
from tests.worker.test_step_faults import FragileEngine


class GatedEngine(FragileEngine):
    """A cleared gate holds steps up."""

    def __init__(self) -> None:
        super().__init__()
        self.stepping = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        self.stepping.set()
        assert self.gate.wait(20)
        return super().step(taps)


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()


@pytest.fixture
async def built(engine: GatedEngine) -> AsyncIterator[Stage]:
    async with stage(worker_of({}, engine)) as running:
        yield running
        engine.gate.set()


async def freed(built: Stage, engine: ToyEngine) -> None:
    """Return when the engine holds no text."""
    async with asyncio.timeout(20):
        while engine.contexts:
            await built.worker.export_learned()  # between two steps


async def test_many_links_write_many_texts_at_once(built: Stage, engine: GatedEngine):
    peers = [built.connect() for _ in range(3)]
    texts = await asyncio.gather(
        *(
            peer.written(*(opened(f"r{i}", [i, place]) for i in range(4)))
            for place, peer in enumerate(peers)
        )
    )
    assert texts == [[plain([i, place]) for i in range(4)] for place in range(3)]
    await freed(built, engine)


async def test_texts_that_come_during_a_step_join_the_next_one(built: Stage, engine: GatedEngine):
    peer = built.connect()
    engine.gate.clear()
    await peer.open(opened("first"))
    await asyncio.to_thread(engine.stepping.wait, 20)
    for name in "abc":
        await peer.open(opened(name))
    await built.connect().next()  # the links are read while a step lasts
    engine.gate.set()
    await peer.until(lambda: len(peer.verdicts["c"]) == 1)
    assert [len(peer.verdicts[name]) for name in ("first", "a", "b")] == [2, 1, 1]


async def test_the_first_frame_brings_seats_and_adapters_and_news_come_by_themselves(
    built: Stage,
):
    adapters = AdapterList(("sql@1",))
    built.worker.streams.announce(adapters)
    peer = built.connect()
    first = await peer.next()
    assert (first.serial, first.adapters, first.load) == (1, adapters, Load(seats=64))
    news = AdapterList(("sql@2",), "the last one was broken")
    built.worker.streams.announce(news)
    assert (await peer.next()).adapters == news


async def test_a_broken_engine_ends_every_link_and_reports_unhealthy(
    built: Stage, engine: GatedEngine
):
    peer, idle = built.connect(), built.connect()
    await idle.next()
    engine.failures.append(WorkerError("a rank is gone"))
    await peer.open(opened())
    for serving in built.serving:
        with pytest.raises(WorkerError):
            await asyncio.wait_for(serving, 20)
    assert not built.worker.is_healthy
    with pytest.raises(WorkerError):
        await built.worker.serve(idle.link)


class LeavingEngine(ToyEngine):
    """Ends its thread."""

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        raise SystemExit


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_an_engine_thread_that_ends_ends_every_link():
    engine = LeavingEngine()
    async with stage(worker_of({}, engine)) as built:
        peer = built.connect()
        await peer.open(opened())
        with pytest.raises(WorkerError, match="engine thread ended: SystemExit"):
            await asyncio.wait_for(built.serving[0], 20)
        assert not built.worker.is_healthy
        learned = asyncio.ensure_future(built.worker.export_learned())
        await asyncio.wait({learned}, timeout=20)
        assert learned.cancelled()  # and nobody waits for ever


async def test_stopping_ends_the_thread(built: Stage):
    assert await built.connect().written(opened()) == [plain()]
    await asyncio.to_thread(built.worker.stop)
    assert not built.worker.is_healthy


async def test_a_heartbeat_names_the_texts_that_are_here_while_a_step_lasts(
    built: Stage, engine: GatedEngine
):
    peer, other = built.connect(), built.connect()
    engine.gate.clear()
    await peer.send(StepFrame((opened("a"), opened("b", generation=7)), serial=3))
    await other.open(opened("elsewhere"))
    await asyncio.to_thread(engine.stepping.wait, 20)
    await peer.open(opened("not taken in yet"))
    beat, others = await peer.next_beat(), await other.next_beat()
    assert beat.heartbeat == Heartbeat((TextName("a", 1), TextName("b", 7)), 3)
    # It may have come during the step.
    assert others.heartbeat in (Heartbeat((TextName("elsewhere", 1),), 0), Heartbeat((), 0))
    for load in (beat.load, others.load):
        assert (load.seats, load.num_running) == (32, 0)
        assert load.num_waiting in (2, 3)


async def test_no_heartbeat_waits_for_a_step_of_the_coordinator_that_counts_either(
    engine: GatedEngine,
):
    async with stage(worker_of({}, engine, heartbeat_s=0.01)) as built:
        peer = built.connect()
        await peer.until(lambda: bool(peer.frames) and bool(peer.frames[-1].status))
        engine.gate.clear()
        await peer.open(opened())
        await asyncio.to_thread(engine.stepping.wait, 20)
        try:
            # One may be on its way, and before another the report is asked for.
            for _ in range(5):
                await peer.next_beat()
        finally:
            engine.gate.set()
        await peer.until(lambda: peer.is_over())


async def test_one_coordinator_counts_the_targets_own_metrics_and_another_after_it(
    built: Stage,
):
    first, second = built.connect(), built.connect()
    await second.written(opened())
    await first.until(lambda: any(frame.page for frame in first.frames))
    counted = next(frame for frame in first.frames if frame.page)
    assert f"{metrics.DEFICIT.name}{{" in counted.page.decode()
    assert counted.report.pages_total == 1000
    assert json.loads(counted.status).keys() == {
        "scores",
        "loads",
        "rollouts",
        "residents",
        "faults",
        "written_at",
    }
    await second.until(lambda: any(frame.heartbeat for frame in second.frames[1:]))
    assert not any(frame.page or frame.status for frame in second.frames)
    await first.link.close()
    await second.until(lambda: bool(second.frames[-1].status))


async def test_texts_of_a_coordinator_that_falls_silent_are_freed(engine: GatedEngine):
    async with stage(worker_of({}, engine, target_silence_s=0.05)) as built:
        peer = built.connect()
        await peer.open(opened(params=replace(GREEDY, max_tokens=3000)))
        await asyncio.wait_for(built.serving[0], 20)
        await freed(built, engine)
        assert built.worker.is_healthy


class BlockingOracle(GreedyOracle):
    """Drafts when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.is_asked = threading.Event(), threading.Event()

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Proposal]:
        self.is_asked.set()
        assert self.gate.wait(20)
        return super().propose(tasks)


async def test_the_verdicts_leave_before_anything_is_drafted():
    oracle = BlockingOracle()
    async with stage(worker_of({"a": oracle})) as built:
        peer = built.connect()
        await peer.open(opened(drafters=("a",)))
        try:
            await peer.until(lambda: len(peer.verdicts["r"]) == 1)
            assert await asyncio.to_thread(oracle.is_asked.wait, 20)
            assert oracle.tasks == []  # it is still in its first call
        finally:
            oracle.gate.set()
        await peer.until(lambda: peer.is_over())
    assert peer.text() == plain()
    assert peer.verdicts["r"][1].num_nodes == 4


async def test_what_was_learned_is_exported_and_restored():
    oracle = GreedyOracle()
    async with stage(worker_of({"a": oracle})) as built:
        await built.connect().written(opened(drafters=("a",)))
        state = json.loads(json.dumps(await built.worker.export_learned()))
    successor = worker_of({"a": GreedyOracle()})
    successor.restore_learned(state)
    async with stage(successor) as built:
        assert json.loads(json.dumps(await built.worker.export_learned())) == state
        assert await built.connect().written(opened()) == [plain()]
    untaught = worker_of({"a": GreedyOracle()})
    async with stage(untaught) as built:
        assert json.loads(json.dumps(await built.worker.export_learned())) != state
