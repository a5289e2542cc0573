"""Measures the time per round outside the model's forward pass, at batch size 1.

    python -m benchmarks.overhead

One stream at a time over HTTP.  The coordinator stamps each verify frame; the overhead of a round
is the time between two frames minus the forward time that the target reports.  It contains
coordinator, gRPC both ways, codec, the engine's batch building, draw and walk, and CPU time that
ingress and drafters take from the same cores.  The median comes from the histogram
`drafthouse_round_overhead_seconds` (linear within a bucket).  As an external check, the median gap
between two chunks of the client's stream is reported too.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import re
import statistics
import time
from typing import Any

from benchmarks.equality import body_of
from benchmarks.serving import ROOT, Server, add_server_options, heldout, running, write_report

OVERHEAD = "drafthouse_round_overhead_seconds"
STEP = "drafthouse_target_step_seconds"


def histogram(server: Server, name: str) -> dict[float, float]:
    """Maps upper bounds to cumulative counts, summed over label sets."""
    counts: dict[float, float] = {}
    for sample, labels, value in server.metrics():
        bound = re.search(r'le="([^"]+)"', labels)
        if sample == f"{name}_bucket" and bound:
            counts[float(bound.group(1))] = counts.get(float(bound.group(1)), 0.0) + value
    return counts


def quantile(before: dict[float, float], after: dict[float, float], share: float) -> float:
    """The quantile of the observations between two readings, in seconds."""
    grown = {bound: count - before.get(bound, 0.0) for bound, count in sorted(after.items())}
    total = max(grown.values())
    low, below = 0.0, 0.0
    for bound, count in grown.items():
        if count >= share * total:
            if bound == float("inf") or count == below:
                return low
            return low + (bound - low) * (share * total - below) / (count - below)
        low, below = bound, count
    return low


async def stream_gaps(server: Server, bodies: list[dict[str, Any]]) -> list[float]:
    """Seconds between chunks; streams run one after the other."""
    gaps: list[float] = []
    async with server.client() as client:
        for body in bodies:
            stamps: list[float] = []
            async with client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}
            ) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        stamps.append(time.perf_counter())
            gaps += [later - sooner for sooner, later in itertools.pairwise(stamps)]
    return gaps


def measure(server: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "models" / "demo-target")
    prompts = heldout("code", arguments.prompts, tokenizer, 20, 400)
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens}
    laws = {"greedy": {"temperature": 0.0}, "temperature 0.8": {"temperature": 0.8, "seed": 1}}
    switches = {"speculation on": {"enabled": True}, "speculation off": {"enabled": False}}
    for (law, parameters), (switch, speculation) in itertools.product(
        laws.items(), switches.items()
    ):
        bodies = [
            body_of(
                "drafthouse-demo", prompt, arguments.max_tokens, ignore_eos=True,
                speculation=speculation, metadata={"task": "code"}, **parameters,
            )
            for prompt in prompts
        ]  # fmt: skip
        asyncio.run(stream_gaps(server, bodies[:2]))  # warm-up
        before = {name: histogram(server, name) for name in (OVERHEAD, STEP)}
        gaps = asyncio.run(stream_gaps(server, bodies))
        after = {name: histogram(server, name) for name in (OVERHEAD, STEP)}
        report[f"{law}, {switch}"] = {
            "rounds": max(after[OVERHEAD].values()) - max(before[OVERHEAD].values()),
            "outside the forward, median ms": round(
                1e3 * quantile(before[OVERHEAD], after[OVERHEAD], 0.5), 2
            ),
            "outside the forward, p90 ms": round(
                1e3 * quantile(before[OVERHEAD], after[OVERHEAD], 0.9), 2
            ),
            "target step, median ms": round(1e3 * quantile(before[STEP], after[STEP], 0.5), 2),
            "gap between chunks at the client, median ms": round(1e3 * statistics.median(gaps), 2),
        }
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    add_server_options(parser)
    arguments = parser.parse_args()
    with running(arguments.config, arguments.overrides, arguments.url) as server:
        write_report("overhead", measure(server, arguments))


if __name__ == "__main__":
    main()
