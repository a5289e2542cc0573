"""Serves a mixed load, then nothing, then a request, and looks for errors, warnings and growth.

python -m benchmarks.faults.soak --streams 64 --seconds 180 --idle 600

Exits with 1 if there was an error or a warning that its start does not explain, if a request is
left over, or if memory, threads or descriptors of a process grew after the first third of a phase
by more than two percent.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support.options import (
    DEMO_NAME,
    DEMO_TARGET,
    add_options,
    add_server_options,
    parser_of,
)
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, running
from cluster.errors import WorkerError
from deployments.openai_client import OpenAIServer

# Of each phase.
_NUM_SAMPLES = 30
_MOST_GROWTH = 2.0
# Said at the start where a processor does not multiply bfloat16.
_EXPLAINED = "products are in float32"
# The deployment in a replica's command line, which Serve and Ray rewrite as they go.
_REPLICA = re.compile(r"ServeReplica:([\w:-]+)")


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


Usage = dict[str, dict[str, float]]


def usage_of(server: Server) -> Usage:
    """Memory, threads and descriptors of the serving processes, by Serve replica."""
    found: Usage = {}
    # One that somebody else has started is among all processes.
    for process in psutil.Process(server.process_id or 1).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = _REPLICA.search(" ".join(process.cmdline()))
            if title is None:
                continue
            name = f"{title[1]} ({process.pid})"
            found[name] = {
                "MiB": round(process.memory_info().rss / 2**20, 1),
                "threads": process.num_threads(),
                "descriptors": process.num_fds(),
            }
    return found


def growth_of(samples: list[Usage]) -> dict[str, float]:
    """By how many percent the medians of the last third exceed those of the second, at most, of
    any process that ran all the time.

    The first third fills caches and pools; a leak shows in the slope after that."""
    third = len(samples) // 3
    middle, last = samples[third : 2 * third], samples[2 * third :]
    lived = set(samples[third]).intersection(*samples[third:])

    def growth(kind: str, name: str) -> float:
        before, after = (
            statistics.median(each[name][kind] for each in part) for part in (middle, last)
        )
        return round(100.0 * (after / before - 1.0), 2)

    return {
        kind: max((growth(kind, name) for name in lived), default=0.0)
        for kind in ("MiB", "threads", "descriptors")
    }


def memory_by_process(samples: list[Usage]) -> dict[str, list[float]]:
    """The memory of each process at every sixth sample, MiB."""
    return {
        name: [each[name]["MiB"] for each in samples[:: _NUM_SAMPLES // 5] if name in each]
        for name in samples[-1]
    }


async def soak(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(DEMO_TARGET)
    prompts = heldout("code", 40, tokenizer, 8, 600) + heldout("prose", 40, tokenizer, 8, 600)
    tally = Tally()
    deadline = time.monotonic() + arguments.seconds

    async def watch(seconds: float) -> list[Usage]:
        samples = []
        for _ in range(_NUM_SAMPLES):
            await asyncio.sleep(seconds / _NUM_SAMPLES)
            samples.append(usage_of(server))
        return samples

    async with OpenAIServer(server.url) as api:
        loaded, *_ = await asyncio.gather(
            watch(arguments.seconds),
            *(
                stream_forever(api, prompts, seed, deadline, tally)
                for seed in range(arguments.streams)
            ),
        )
        pages = await _pages_until_zero(server)
        idle = await watch(arguments.idle) if arguments.idle else []
        await stream_forever(api, prompts, 0, time.monotonic() + 1.0, tally)
    return {
        "streams": arguments.streams,
        "seconds": arguments.seconds,
        "idle seconds": arguments.idle,
        "requests": tally.requests,
        "abandoned": tally.aborted,
        "tokens per second": round(tally.tokens / arguments.seconds, 1),
        "errors": len(tally.errors),
        "first errors": tally.errors[:5],
        "pages in use afterwards": pages,
        "running requests afterwards": server.page().total("drafthouse_running_requests"),
        "growth under load, %": growth_of(loaded),
        "growth while idle, %": growth_of(idle) if idle else {},
        "MiB by process": memory_by_process(loaded + idle),
        "at the end": (idle or loaded)[-1],
    }


def is_sound(report: dict[str, Any]) -> bool:
    """True if nothing was wrong, and nothing grew."""
    grown = [*report["growth under load, %"].values(), *report["growth while idle, %"].values()]
    is_left = any(report["pages in use afterwards"].values())
    is_left = is_left or report["running requests afterwards"] > 0
    is_warned = any(_EXPLAINED not in each for each in report["warnings"])
    is_wrong = report["errors"] or is_warned or is_left
    return not is_wrong and max(grown, default=0.0) <= _MOST_GROWTH


async def _pages_until_zero(server: Server, patience_s: float = 10.0) -> dict[str, float]:
    deadline = time.monotonic() + patience_s
    while True:
        pages = server.page().by("drafthouse_kv_pages_in_use", "worker")
        if not any(pages.values()) or time.monotonic() > deadline:
            return pages
        await asyncio.sleep(0.2)


def main() -> None:
    parser = parser_of(__doc__)
    add_options(
        parser,
        streams=64,
        seconds=180.0,
        idle=(0.0, "seconds without a request"),
    )
    add_server_options(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with running(arguments.config, arguments.overrides, arguments.url, log=log) as server:
            report = asyncio.run(soak(server, arguments))
        lines = log.read_text("utf-8", "replace").splitlines() if log.exists() else []
    report["warnings"] = [each for each in lines if "WARNING" in each or "ERROR" in each]
    show_report(OUT / "faults" / "soak.json", report)
    sys.exit(0 if is_sound(report) else 1)


if __name__ == "__main__":
    main()
