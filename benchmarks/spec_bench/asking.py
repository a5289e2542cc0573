"""One run: a fresh server, all its blocks of questions, and the answers."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from benchmarks.spec_bench.client import Asker
from benchmarks.spec_bench.peers.engines import ANSWERED, READY
from benchmarks.spec_bench.peers.makers import TITLES, engine_command, environment
from benchmarks.spec_bench.plan import OURS, PLAIN, Block, Run
from benchmarks.spec_bench.servers import Asked, Setup, ours, peer
from benchmarks.support.processes import PinnedProcess
from deployments.openai_client import OpenAIServer

# The number of characters of an answer that are kept, to see that it is sensible.
_TEXT_LEN = 200
HTTP, IN_PROCESS = "HTTP", "in process"
WAYS = {
    "vllm": (HTTP, IN_PROCESS),
    "llama": (HTTP,),
    "openvino": (IN_PROCESS,),
}

Told = Callable[[], object]


def peer_name(maker: str, mode: str, way: str) -> str:
    """Return a peer's name in tables: its maker, its mode and its interface."""
    return f"{TITLES[maker]} {mode}, {way}"


def answer(run: Run, setup: Setup, max_tokens: int, told: Told) -> list[dict[str, Any]]:
    """Ask all blocks of a run on a new server.  told: called after each question.

    Raises RuntimeError, OSError or httpx.HTTPError if the server fails.
    """
    if run.server == OURS:
        with ours(setup) as asked:
            return asyncio.run(_over_http(run, asked, max_tokens, told))
    name, _, way = run.server.partition(", ")
    title, _, mode = name.partition(" ")
    (maker,) = [each for each, known in TITLES.items() if known == title]
    if way == HTTP:
        with peer(maker, mode, setup) as asked:
            return asyncio.run(_over_http(run, asked, max_tokens, told))
    with _engine(maker, mode, setup) as process:
        blocks = []
        for block in run.blocks:
            for _ in range(run.seen):
                _in_process(process, block, run, max_tokens, lambda: None)
            blocks.append(_in_process(process, block, run, max_tokens, told))
        return blocks


async def _over_http(run: Run, asked: Asked, max_tokens: int, told: Told) -> list[dict[str, Any]]:
    blocks = []
    # llama.cpp ends a connection behind a stream without saying so: every request has its own.
    async with OpenAIServer(asked.url, keeps_connections=False) as server:
        for block in run.blocks:
            extra = {"speculation": {"enabled": False}} if block.system == PLAIN else {}
            extra = {**asked.extra, **extra}
            # A seed would make vLLM use a generator per request, with which it draws slower.
            asker = Asker(server, asked.model, run.law, max_tokens, extra, run.server == OURS)
            try:
                for _ in range(run.seen):
                    await asker.ask_all(block.questions, block.concurrency, lambda: None)
                asker.refused.clear()
                turns = await asker.ask_all(block.questions, block.concurrency, told)
            except ExceptionGroup as group:
                raise group.exceptions[0] from group
            blocks.append(_block(block, [asdict(turn) for turn in turns], asker.refused))
    return blocks


@contextmanager
def _engine(maker: str, mode: str, setup: Setup) -> Iterator[PinnedProcess]:
    """A peer in process, in its own interpreter."""
    command = engine_command(
        f"{maker}-{mode}",
        setup.programs,
        setup.model,
        setup.draft,
        setup.dtype,
        setup.max_sequences,
        setup.max_context_len,
    )
    cores = sorted(os.sched_getaffinity(0))
    log = setup.log / f"{maker}-{mode}-in-process.log"
    process = PinnedProcess(command, cores, log, environment(maker, cores))
    try:
        while process.read_line() != READY:
            continue
        yield process
    finally:
        process.stop()


def _in_process(
    process: PinnedProcess, block: Block, run: Run, max_tokens: int, told: Told
) -> dict[str, Any]:
    question = {
        "questions": [asdict(each) for each in block.questions],
        "max_tokens": max_tokens,
        "temperature": run.law.temperature,
        "concurrency": block.concurrency,
    }
    process.write_line(json.dumps(question))
    while (line := process.read_line()) == ANSWERED:
        told()
    reply = json.loads(line)
    return _block(block, reply["turns"], reply["refused"])


def _block(
    block: Block, turns: Sequence[Mapping[str, Any]], refused: Sequence[int]
) -> dict[str, Any]:
    return {
        "system": block.system,
        "concurrency": block.concurrency,
        "refused": list(refused),
        "turns": [{**turn, "text": turn["text"][:_TEXT_LEN]} for turn in turns],
    }
