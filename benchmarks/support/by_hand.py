"""Runs Drafthouse as separate processes without Ray: `cluster.worker` and `cluster.lead`."""

from __future__ import annotations

import asyncio
import itertools
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.support.answers import Acceptance, Answer, Law, Result
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.prompts import Prompt
from cluster.config.file import load
from cluster.core import (
    FinishReason,
    Request,
    SamplingParams,
    SpeculationOptions,
    SpeculationStats,
    TokenEvent,
    token_array,
)
from cluster.records import frozen
from cluster.rpc.channel import CoordinatorLink, connect_coordinator
from cluster.rpc.link import Link
from cluster.rpc.messages import EventFrame, SubmitFrame

_JOIN_S = 30.0


@frozen
class Setup:
    """The settings for starting our processes.

    overrides: KEY=VALUE of the configuration.  drafters: names of the drafters to start; every
    request may use all of them.  by_task: use the configuration's drafters per task instead.
    log: folder for the processes' logs.  target_cores: None = the cores of the other processes.
    """

    config: str
    overrides: tuple[str, ...]
    drafters: tuple[str, ...]
    cores: tuple[int, ...]
    log: Path
    by_task: bool = False
    target_cores: tuple[int, ...] | None = None


class Ours:
    """Target, drafters and coordinator; requests use the coordinator's own gRPC stream."""

    def __init__(self, setup: Setup) -> None:
        """Raises KeyError if the configuration lacks one of the drafters."""
        config = load(setup.config, setup.overrides).config
        known = config.drafters
        for name in setup.drafters:
            if name not in known:
                raise KeyError(f"{setup.config} has no drafter {name!r}, only {', '.join(known)}")
        self._setup = setup
        self._pool = [name for name in setup.drafters if name in config.pool]
        self._processes: dict[str, PinnedProcess] = {}
        self._address = ""

    @property
    def processes(self) -> dict[str, PinnedProcess]:
        return dict(self._processes)

    def start(self) -> None:
        """Start all processes; returns when every worker has joined, residents in the target."""
        names = self._pool
        self._start("target", "cluster.worker", "target", self._setup.config)
        for name in names:
            self._start(name, "cluster.worker", "draft", self._setup.config, name)
        addresses = {name: each.ready_address() for name, each in self._processes.items()}
        target = ["--target", addresses["target"]]
        drafters = [word for name in names for word in ("--drafter", f"{name}={addresses[name]}")]
        self._start("lead", "cluster.lead", self._setup.config, *target, *drafters)
        self._address = self._processes["lead"].ready_address()
        asyncio.run(self._wait_until_joined(len(names)))

    def stop(self) -> None:
        for name in reversed(self._processes):
            self._processes[name].stop()
        self._processes.clear()

    def run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result:
        """Continue the prompts, `concurrency` at a time; a new one starts whenever one ends."""
        return asyncio.run(self._run(prompts, max_tokens, law, concurrency, seed))

    def _start(self, name: str, module: str, *words: str) -> None:
        overrides = [word for each in self._setup.overrides for word in ("--set", each)]
        command = [sys.executable, "-m", module, *words, *overrides, "--log-level", "WARNING"]
        log = self._setup.log / f"{name}.log"
        cores = self._setup.cores
        if name == "target" and self._setup.target_cores is not None:
            cores = self._setup.target_cores
        self._processes[name] = PinnedProcess(command, cores, log)

    async def _wait_until_joined(self, num_drafters: int) -> None:
        deadline = time.monotonic() + _JOIN_S
        async with self._link() as link:
            while True:
                status = await link.status()
                if status["targets"] and len(status["drafters"]) >= num_drafters:
                    return
                if time.monotonic() > deadline:
                    raise RuntimeError(f"not all workers have joined; see {self._setup.log}")
                await asyncio.sleep(0.05)

    @asynccontextmanager
    async def _link(self) -> AsyncIterator[CoordinatorLink]:
        _, link = await connect_coordinator(self._address)
        try:
            yield link
        finally:
            await link.close()

    async def _run(
        self, prompts: Sequence[Prompt], max_tokens: int, law: Law, concurrency: int, seed: int
    ) -> Result:
        params = SamplingParams(temperature=law.temperature, max_tokens=max_tokens)
        names = self._setup.drafters
        speculation = SpeculationOptions(bool(names), drafters=names)
        if self._setup.by_task:
            speculation = SpeculationOptions()
        requests = [
            Request(
                str(index),
                token_array(prompt.token_ids),
                replace(params, seed=seed * 1_000_003 + index),
                prompt.task,
                speculation,
            )
            for index, prompt in enumerate(prompts)
        ]
        async with self._link() as link:
            return await complete(link, requests, concurrency)


async def complete(
    link: Link[SubmitFrame, EventFrame], requests: Sequence[Request], concurrency: int
) -> Result:
    """Run requests over one link; raises RuntimeError for the first request that fails."""
    answers: dict[str, _PendingAnswer] = {}
    waiting, frames = iter(requests), aiter(link)

    async def submit(batch: Sequence[Request]) -> None:
        now = time.perf_counter()
        for request in batch:
            answers[request.id] = _PendingAnswer(now)
        if batch:
            await link.send(SubmitFrame(tuple(batch)))

    await submit(list(itertools.islice(waiting, concurrency)))
    num_ended = 0
    while num_ended < len(requests):
        frame = await anext(frames)
        now = time.perf_counter()
        ended = [event for event in frame.events if answers[event.request_id].take(event, now)]
        num_ended += len(ended)
        await submit(list(itertools.islice(waiting, len(ended))))
    stats = [answers[request.id].stats for request in requests]
    acceptance = Acceptance(
        sum(each.num_spec_steps for each in stats),
        sum(each.num_accepted_draft_tokens for each in stats),
    )
    whole = tuple(answers[request.id].answer() for request in requests)
    return Result(whole, acceptance if acceptance.steps else None)


class _PendingAnswer:
    """An answer that is still arriving."""

    def __init__(self, submitted_s: float) -> None:
        self.stats = SpeculationStats()
        self._submitted_s = submitted_s
        self._events: list[tuple[float, int]] = []
        self._token_ids: list[int] = []

    def take(self, event: TokenEvent, now: float) -> bool:
        """Add an event; returns whether it is the last one."""
        if event.finish_reason is FinishReason.ERROR:
            raise RuntimeError(f"a request failed: {event.error_message}")
        if len(event.token_ids):
            self._token_ids += event.token_ids.tolist()
            self._events.append((now, len(self._token_ids)))
        self.stats = event.stats or self.stats
        return event.finish_reason is not None

    def answer(self) -> Answer:
        return Answer(self._submitted_s, tuple(self._events), tuple(self._token_ids))
