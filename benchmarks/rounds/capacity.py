"""Measures the tokens that the coordinator commits per second of its CPU time, with null workers.

Coordinator, null workers and a client run in one thread on one event loop, over in-process links.
The CPU time of the workers' and the client's functions is measured with the thread's CPU clock and
subtracted, because in production other processes do that work.  The rest is the coordinator's: its
relay, the links, the event loop and all garbage collection.  gRPC and the codec are not
included; see `rounds`.
"""

from __future__ import annotations

import asyncio
import cProfile
import io
import pstats
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.rounds.null_workers import (
    NUM_NODES,
    TOKENS_PER_ROUND,
    NullDrafter,
    NullTarget,
    OwnTime,
    text,
)
from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.coordinator.coordinator import Coordinator
from cluster.core import Request, SamplingParams
from cluster.messages import EventFrame, SubmitFrame, VerdictFrame
from cluster.rpc.link import Link
from cluster.rpc.memory import memory_pair

_PROMPT_LEN = 63  # a multiple of the period
_FIRST_ROUNDS = 5  # not measured: opening, and rounds before the drafters have answered

Frames = list[VerdictFrame]


@dataclass(frozen=True, slots=True)
class Load:
    """The load on the coordinator."""

    num_sequences: int = 256
    num_rounds: int = 100
    num_drafters: int = 1
    budget: Literal["fixed", "adaptive"] = "fixed"


@dataclass(frozen=True, slots=True)
class Capacity:
    """process_cpu_s: total CPU time.  worker_cpu_s, client_cpu_s: the parts to subtract."""

    committed_tokens: int
    process_cpu_s: float
    worker_cpu_s: float
    client_cpu_s: float
    nodes_per_item: float
    tokens_per_item: float

    @property
    def coordinator_cpu_s(self) -> float:
        return self.process_cpu_s - self.worker_cpu_s - self.client_cpu_s

    def report(self) -> dict[str, float]:
        return {
            "committed tokens": self.committed_tokens,
            "committed tokens per CPU-second of the coordinator": round(
                self.committed_tokens / self.coordinator_cpu_s
            ),
            "the same, null workers and client not subtracted": round(
                self.committed_tokens / self.process_cpu_s
            ),
            "process CPU s": round(self.process_cpu_s, 3),
            "null workers' CPU s": round(self.worker_cpu_s, 3),
            "client's CPU s": round(self.client_cpu_s, 3),
            "draft nodes per sequence and round": round(self.nodes_per_item, 2),
            "tokens per sequence and round": round(self.tokens_per_item, 2),
        }


class _Client:
    """Submits every request at once, reads all events and checks their tokens."""

    def __init__(self, link: Link[SubmitFrame, EventFrame], load: Load) -> None:
        self.time = OwnTime()
        self.num_tokens = 0
        self._link = link
        self._load = load
        # One more round than measured, so that all sequences run during the whole measurement.
        self._max_tokens = TOKENS_PER_ROUND * (load.num_rounds + 2 * _FIRST_ROUNDS)

    async def submit(self) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=self._max_tokens)
        prompt = text(0, _PROMPT_LEN)
        requests = [Request(str(i), prompt, params) for i in range(self._load.num_sequences)]
        await self._link.send(SubmitFrame(tuple(requests)))

    async def read_until(self, num_tokens: int) -> None:
        """Read until `num_tokens` tokens have arrived; raises RuntimeError for a wrong token."""
        async for frame in self._link:
            if not frame.events:  # it tells how busy the coordinator is
                continue
            start = time.thread_time()
            for event in frame.events:
                if event.error_code:
                    raise RuntimeError(f"a request failed: {event.error_message}")
                self.num_tokens += len(event.token_ids)
            _check(frame)
            self.time.cpu_s += time.thread_time() - start
            if self.num_tokens >= num_tokens:
                return
        raise RuntimeError("the coordinator has ended the link")


def _check(frame: EventFrame) -> None:
    """Compare a sample of the frame with the target's text; raises RuntimeError if it differs."""
    event = frame.events[-1]
    expected = text(_PROMPT_LEN + event.position, len(event.token_ids))
    if event.token_ids.tolist() != expected.tolist():
        raise RuntimeError("the coordinator delivered tokens that the target did not emit")


async def run(load: Load, *, keep_frames: bool = False) -> tuple[Capacity, Frames]:
    """One measurement; keep_frames: also return those of the target."""
    names = [f"null-{index}" for index in range(load.num_drafters)]
    settings = CoordinatorConfig(
        max_running_sequences=load.num_sequences, max_queued_requests=load.num_sequences,
        max_draft_tokens=NUM_NODES, budget=load.budget, max_frame_bytes=64 * 1024 * 1024,
    )  # fmt: skip
    config = Config(
        drafters={name: DrafterConfig(kind="prompt_lookup") for name in names},
        coordinator=settings,
    )
    target, drafters = NullTarget(), [NullDrafter(name) for name in names]
    target.keeps_frames = keep_frames
    coordinator = Coordinator(config)
    await coordinator.start()
    ours, theirs = memory_pair()
    tasks = [asyncio.create_task(target.serve(theirs))]
    coordinator.add_target("null", target.describe(load.num_sequences), ours)
    for drafter in drafters:
        ours, theirs = memory_pair()
        tasks.append(asyncio.create_task(drafter.serve(theirs)))
        coordinator.add_drafter(drafter.name, drafter.name, drafter.describe(), ours)
    asking, answering = memory_pair()
    tasks.append(asyncio.create_task(coordinator.serve(answering)))
    client = _Client(asking, load)
    try:
        await client.submit()
        capacity = await _measure(load, client, target, drafters)
    finally:
        await asking.close()
        await coordinator.stop()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return capacity, target.frames


async def _measure(
    load: Load, client: _Client, target: NullTarget, drafters: Sequence[NullDrafter]
) -> Capacity:
    per_round = load.num_sequences * TOKENS_PER_ROUND
    workers = [target.time, *(drafter.time for drafter in drafters)]
    await client.read_until(_FIRST_ROUNDS * per_round)
    target.frames.clear()
    tokens, items, nodes = client.num_tokens, target.time.num_items, target.time.num_nodes
    worker_s, client_s = sum(each.cpu_s for each in workers), client.time.cpu_s
    process_s = time.process_time()
    await client.read_until(tokens + load.num_rounds * per_round)
    process_s = time.process_time() - process_s
    num_items = target.time.num_items - items
    num_tokens = client.num_tokens - tokens
    return Capacity(
        committed_tokens=num_tokens,
        process_cpu_s=process_s,
        worker_cpu_s=sum(each.cpu_s for each in workers) - worker_s,
        client_cpu_s=client.time.cpu_s - client_s,
        nodes_per_item=(target.time.num_nodes - nodes) / num_items,
        tokens_per_item=num_tokens / num_items,
    )


def profile(load: Load) -> pstats.Stats:
    """Run the load under cProfile; use only shares of time, because the profiler slows calls."""
    profiler = cProfile.Profile()
    profiler.enable()
    try:
        asyncio.run(run(load))
    finally:
        profiler.disable()
    return pstats.Stats(profiler, stream=io.StringIO())


def costs(stats: pstats.Stats, count: int = 5) -> list[dict[str, Any]]:
    """The functions with the largest own time, without null workers, and their shares."""
    rows = [
        (place, calls, own)
        for place, (_, calls, own, _, _) in _rows(stats).items()
        if "benchmarks" not in place[0] and place[2] != "<built-in method time.thread_time>"
    ]
    total = sum(own for _, _, own in rows)
    rows.sort(key=lambda row: row[2], reverse=True)
    return [
        {"function": _name(place), "calls": calls, "share of own time": round(own / total, 3)}
        for place, calls, own in rows[:count]
    ]


def parts(stats: pstats.Stats, names: dict[str, tuple[str, str]]) -> dict[str, float]:
    """The share of the profiled time inside some functions and their callees.

    names: name of a part -> the end of its file's path, and the function's name.
    """
    rows = _rows(stats)
    workers = sum(
        row[3] for place, row in rows.items() if "null_workers" in place[0] and place[2] == "answer"
    )
    total = sum(row[2] for row in rows.values()) - workers
    shares = {}
    for part, (file, function) in names.items():
        inside = [
            row[3] for place, row in rows.items()
            if place[0].endswith(file) and place[2] == function
        ]  # fmt: skip
        if inside:
            shares[part] = round(sum(inside) / total, 3)
    return shares


def _rows(stats: pstats.Stats) -> dict[tuple[str, int, str], tuple[int, int, float, float, Any]]:
    rows: dict[tuple[str, int, str], tuple[int, int, float, float, Any]] = stats.stats  # type: ignore[attr-defined]
    return rows


def _name(place: tuple[str, int, str]) -> str:
    file, line, function = place
    short = "/".join(file.split("/")[-3:]) if line else ""
    return f"{short}:{function}" if short else function
