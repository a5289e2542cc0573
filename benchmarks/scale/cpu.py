"""Measures the CPU time of an ingress, and of coordinators, per token that is streamed.

    python -m benchmarks.scale.cpu                        64 streams, over HTTP and over gRPC
    python -m benchmarks.scale.cpu --coordinators 1,2,4   the same load over some coordinators

A null target makes steps at a fixed pace; all else is real, in processes of its own without Ray.
The times are user and system time of a whole process, from /proc, between two moments at which all
streams run.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import uvloop

from benchmarks.scale.paced_target import TOKENS_PER_STEP
from benchmarks.scale.readers import GrpcReader, HttpReader
from benchmarks.scale.stack import Plan, Stack, running
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, show_report

Reader = HttpReader | GrpcReader
_PATIENCE_S = 30.0


@asynccontextmanager
async def streams(stack: Stack, how: str, count: int) -> AsyncIterator[Sequence[Reader]]:
    """Open streams, and leave when each has had a token."""
    readers: list[Reader] = []
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{stack.grpc_port}", options) as channel:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            if how == "gRPC":
                readers.append(GrpcReader(channel))
            else:
                make = partial(HttpReader, is_chat=how == "HTTP chat")
                _, reader = await loop.create_connection(make, "127.0.0.1", stack.http_port)
                readers.append(reader)
        try:
            async with asyncio.timeout(_PATIENCE_S):
                for reader in readers:
                    await reader.begun.wait()
            yield readers
        finally:
            for reader in readers:
                reader.close()


def _used_s(stack: Stack) -> tuple[float, ...]:
    return stack.ingress.cpu_s(), *(each.cpu_s() for each in stack.coordinators)


async def _measured(stack: Stack, how: str, arguments: argparse.Namespace) -> tuple[float, ...]:
    """Return events and CPU seconds: of the ingress, then of each coordinator."""
    async with streams(stack, how, arguments.streams) as readers:
        await asyncio.sleep(1.0)
        before = (sum(reader.num_events for reader in readers), *_used_s(stack))
        await asyncio.sleep(arguments.seconds)
        after = (sum(reader.num_events for reader in readers), *_used_s(stack))
    return tuple(late - early for late, early in zip(after, before, strict=True))


def measure(arguments: argparse.Namespace, plan: Plan, how: str) -> dict[str, Any]:
    """Measure one cell in processes of its own."""
    with running(plan) as stack:
        events, ingress_s, *coordinators_s = uvloop.run(_measured(stack, how, arguments))
    tokens = events * (TOKENS_PER_STEP if plan.is_drafted else 1)
    asked = arguments.streams * 1e3 / plan.period_ms * arguments.seconds
    return {
        "tokens": tokens,
        "share of the pace": round(events / asked, 3),
        "ingress, CPU ms per token": round(1e3 * ingress_s / tokens, 4),
        "coordinators, CPU ms per token": round(1e3 * sum(coordinators_s) / tokens, 4),
    }


def main() -> int:
    parser = parser_of(__doc__)
    add_options(
        parser,
        streams=64,
        seconds=(8.0, "of each measurement"),
        period_ms=(40.0, "between two steps of the target"),
        how=["HTTP", "HTTP chat", "gRPC"],
        coordinators=[1],
        drafted=(False, "three tokens a step instead of one"),
        name=("ingress", "of the record"),
    )
    arguments = parser.parse_args()
    exit_on_sigterm()
    report = {}
    for how in arguments.how:
        for count in arguments.coordinators:
            plan = Plan(count, arguments.period_ms, arguments.drafted)
            key = f"{how}, {count} coordinator{'s' if count > 1 else ''}"
            report[key] = measure(arguments, plan, how)
            print(key, report[key], file=sys.stderr, flush=True)
    show_report(OUT / f"scale/{arguments.name}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
