"""Runs many concurrent streams for minutes and checks for errors, leaks and memory growth.

python -m benchmarks.faults.soak --streams 64 --seconds 180
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from benchmarks.support.options import DEMO_NAME, DEMO_TARGET, add_server_options, parser_of
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, child_processes, resident_mib, running
from cluster.errors import WorkerError
from deployments.openai_client import OpenAIServer


@dataclass(slots=True)
class Tally:
    """Counts of the results of all streams."""

    requests: int = 0
    tokens: int = 0
    aborted: int = 0
    errors: list[str] = field(default_factory=list)


async def stream_forever(
    api: OpenAIServer, prompts: list[list[int]], seed: int, deadline: float, tally: Tally
) -> None:
    """Send requests and read their streams in a loop; abandons one in ten in mid-stream."""
    choice = random.Random(seed)
    while time.monotonic() < deadline:
        abandon = choice.random() < 0.1
        body: dict[str, Any] = {
            "model": DEMO_NAME,
            "prompt": choice.choice(prompts),
            "max_tokens": choice.randint(8, 96),
            "temperature": choice.choice([0.0, 0.8]),
            "stream_options": {"include_usage": True},
            "metadata": {"task": choice.choice(["code", "prose", "other"])},
        }
        try:
            async with contextlib.aclosing(api.events(body)) as events:
                await _read(events, tally, abandon=abandon)
        except WorkerError as error:
            tally.errors.append(error.message)


async def _read(events: AsyncIterator[dict[str, Any]], tally: Tally, *, abandon: bool) -> None:
    num_events, usage = 0, None
    async for event in events:
        usage = event.get("usage") or usage
        num_events += 1
        if abandon and num_events == 3:
            tally.aborted += 1
            return
    tally.requests += 1
    if usage is None:
        tally.errors.append("a stream ended without its usage")
    else:
        tally.tokens += usage["completion_tokens"]


def memory_mib(server: Server) -> dict[str, float]:
    """Resident memory of the serving processes, by Serve replica."""
    found: dict[str, float] = {}
    for process_id, command in child_processes(server.process_id):
        if "ServeReplica" in command:
            name = command.split()[0].removeprefix("ray::") + f" ({process_id})"
            found[name] = round(resident_mib(process_id), 1)
    return found


async def soak(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    prompts = heldout("code", 40, tokenizer, 8, 600) + heldout("prose", 40, tokenizer, 8, 600)
    tally = Tally()
    deadline = time.monotonic() + arguments.seconds
    samples: list[dict[str, float]] = []

    async def watch() -> None:
        while time.monotonic() < deadline:
            samples.append(memory_mib(server))
            await asyncio.sleep(arguments.seconds / 12)

    async with OpenAIServer(server.url) as api:
        await asyncio.gather(
            watch(),
            *(
                stream_forever(api, prompts, seed, deadline, tally)
                for seed in range(arguments.streams)
            ),
        )
    pages = await _pages_until_zero(server)
    # The first third fills caches and pools; a leak shows in the slope after that.
    settled, last = samples[len(samples) // 3], samples[-1]
    return {
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "requests": tally.requests,
        "abandoned": tally.aborted,
        "tokens per second": round(tally.tokens / arguments.seconds, 1),
        "errors": len(tally.errors),
        "first errors": tally.errors[:5],
        "pages in use afterwards": pages,
        "running requests afterwards": server.page().total("drafthouse_running_requests"),
        "memory MiB after a third": settled,
        "memory MiB at the end": last,
    }


async def _pages_until_zero(server: Server, patience_s: float = 10.0) -> dict[str, float]:
    deadline = time.monotonic() + patience_s
    while True:
        pages = server.page().by("drafthouse_kv_pages_in_use", "worker")
        if not any(pages.values()) or time.monotonic() > deadline:
            return pages
        await asyncio.sleep(0.2)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=180.0)
    add_server_options(parser)
    arguments = parser.parse_args()
    with running(arguments.config, arguments.overrides, arguments.url) as server:
        show_report(OUT / "faults" / "soak.json", asyncio.run(soak(server, arguments)))


if __name__ == "__main__":
    main()
