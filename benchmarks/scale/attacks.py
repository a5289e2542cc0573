"""Measures what steady clients lose while somebody attacks the ingress.

    python -m benchmarks.scale.attacks

Clients with a key read streams of server-sent events at the pace of a null target.  For each kind
of attack there are pairs of intervals, with and without, in turns; figures are the tokens of all
clients per second, and the longest time that some client waited for its next token.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.scale.attackers import ATTACKS
from benchmarks.scale.readers import HttpReader
from benchmarks.scale.stack import Plan, Stack, running
from benchmarks.support.options import parser_of, words
from benchmarks.support.processes import PinnedProcess, exit_on_sigterm
from benchmarks.support.record import OUT, show_report
from cluster.config.access import digest_of

_SETTLE_S = 0.5
_LOOK_EVERY_S = 0.005


@contextlib.contextmanager
def _attacked(kind: str, stack: Stack, answers: Counter[str]) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:
        out, module = Path(name) / "answers.json", "benchmarks.scale.attackers"
        command = [module, kind, str(stack.http_port), str(stack.grpc_port), str(out)]
        process = PinnedProcess([sys.executable, "-m", *command], (0, 1), Path(name) / "log")
        process.read_line()
        try:
            yield
        finally:
            process.stop()
        answers.update(json.loads(out.read_text("utf-8")))


async def _interval(readers: Sequence[HttpReader], seconds: float) -> tuple[float, float]:
    """Return tokens per second, and the longest wait of any client."""
    await asyncio.sleep(_SETTLE_S)
    begun = time.monotonic()
    before = [reader.num_events for reader in readers]
    counts, since, longest = list(before), [begun] * len(readers), 0.0
    while (now := time.monotonic()) < begun + seconds:
        for place, reader in enumerate(readers):
            if reader.num_events != counts[place]:
                counts[place], since[place] = reader.num_events, now
            longest = max(longest, now - since[place])
        await asyncio.sleep(_LOOK_EVERY_S)
    return (sum(counts) - sum(before)) / (now - begun), longest


async def _measured(stack: Stack, key: str, arguments: argparse.Namespace) -> dict[str, Any]:
    readers: list[HttpReader] = []
    loop, report = asyncio.get_running_loop(), dict[str, Any]()
    for _ in range(arguments.streams):
        _, reader = await loop.create_connection(
            lambda: HttpReader([f"authorization: Bearer {key}"]), "127.0.0.1", stack.http_port
        )
        readers.append(reader)
    for reader in readers:
        await reader.begun.wait()
    for kind in arguments.kinds:
        with_, without, answers = [], [], Counter[str]()
        for _ in range(arguments.pairs):
            without.append(await _interval(readers, arguments.seconds))
            with _attacked(kind, stack, answers):
                with_.append(await _interval(readers, arguments.seconds))
        ratios = [one[0] / other[0] for one, other in zip(with_, without, strict=True)]
        report[kind] = {
            "tokens per second, with over without": [round(one, 4) for one in ratios],
            "mean": round(statistics.mean(ratios), 4),
            "longest wait without, ms": round(1e3 * max(one[1] for one in without)),
            "longest wait with, ms": round(1e3 * max(one[1] for one in with_)),
            "the attacker was answered": dict(answers),
        }
        print(kind, report[kind], file=sys.stderr, flush=True)
    for reader in readers:
        reader.close()
    return report


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--streams", type=int, default=64)
    add("--period-ms", type=float, default=25.0, help="between two steps of the target")
    add("--pairs", type=int, default=3)
    add("--seconds", type=float, default=2.0, help="of an interval")
    add("--kinds", type=words, default=list(ATTACKS))
    arguments = parser.parse_args()
    exit_on_sigterm()
    key = secrets.token_urlsafe(32)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.yaml"
        keys.write_text(f"keys: {{steady: {{sha256: {digest_of(key)}}}}}\n", "utf-8")
        keys.chmod(0o600)
        plan = Plan(period_ms=arguments.period_ms, more=f"access: {{keys_file: {keys}}}")
        with running(plan) as stack:
            report = uvloop.run(_measured(stack, key, arguments))
    show_report(OUT / "scale/attacks.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
