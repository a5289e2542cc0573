"""Measures the time between steps beyond the forward, in which no part should wait.

    python -m benchmarks.rounds.period
    python -m benchmarks.rounds.period --delay-ms 20    # on every frame to and from the target
    python -m benchmarks.rounds.period --pause-ms 100   # the coordinator stops once a second

The target's forward takes 8 ms, asleep (as on a GPU) or spinning (as on a CPU).  All the rest is
real: the size of the vocabulary, draws, gRPC, coordinator, a look-up inside the target, a drafter
of the pool and the streams to the ingress, each in its own process as without Ray.  Reports the
mean time between the beginnings of two steps, over the forward's, while all requests are decoding.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.rounds.null_engine import PERIOD, text
from benchmarks.support.by_hand import complete
from benchmarks.support.options import add_options, parser_of
from benchmarks.support.processes import PinnedProcess
from benchmarks.support.record import OUT, show_report
from cluster.core import Request, SamplingParams, SpeculationOptions
from cluster.rpc.channel import connect_coordinator

_CONFIG = """
applications:
- name: null
  args:
    target: {engine: {model: models/demo-target, max_context_len: 1024}}
    drafters:
      suffix: {kind: suffix, placement: {with: target}}
      pool: {kind: suffix, placement: {}}
    coordinator: {budget: BUDGET, max_draft_tokens: 4}
"""
_CORES = (0, 1)


class _Relay:
    """Passes bytes between the coordinator and the target with a delay."""

    def __init__(self, address: str, delay_s: float) -> None:
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._delay_s = delay_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        serving = asyncio.run_coroutine_threadsafe(
            asyncio.start_server(self._serve, "127.0.0.1", 0), self._loop
        )
        self.address = f"127.0.0.1:{serving.result().sockets[0].getsockname()[1]}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(self._host, self._port)
        await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self._loop.call_later(self._delay_s, writer.write, data)


def _requests(count: int, num_tokens: int, is_drafted: bool, round_number: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens)
    # Each prompt contains the period once and ends at another place of it.
    return [
        Request(
            f"{round_number}-{index}",
            text(0, PERIOD + 16 + index),
            replace(params, seed=index),
            speculation=SpeculationOptions(enabled=is_drafted),
        )
        for index in range(count)
    ]


async def _ask(address: str, requests: Sequence[Request]) -> None:
    _, link = await connect_coordinator(address)
    try:
        result = await complete(link, requests, len(requests))
    finally:
        await link.close()
    for request, answer in zip(requests, result.answers, strict=True):
        expected = text(len(request.prompt_ids), len(answer.token_ids))
        if list(answer.token_ids) != expected.tolist():
            raise RuntimeError("a text differs from the target's")


def _pauses(process: PinnedProcess, pause_s: float, is_over: threading.Event) -> None:
    while not is_over.wait(1.0):
        process.pause()
        time.sleep(pause_s)
        process.resume()


def _period(report: Mapping[str, Any], size: int) -> dict[str, float]:
    """Return the figures of the steps that had all texts, without the first and the last ones."""
    steps: Sequence[Sequence[float]] = report["steps"]
    full = [
        index
        for index, step in enumerate(steps[:-1])
        if step[2] == size and steps[index + 1][2] == size
    ]
    full = full[len(full) // 10 : -max(len(full) // 10, 1)]
    periods = [steps[index + 1][0] - steps[index][0] for index in full]
    forwards = [steps[index][1] - steps[index][0] for index in full]
    return {
        "steps": len(full),
        "nodes per text": round(statistics.mean(steps[index][3] for index in full) / size, 2),
        "period over forward": round(statistics.mean(periods) / statistics.mean(forwards), 3),
        "outside, ms": round(1e3 * (statistics.mean(periods) - statistics.mean(forwards)), 2),
        "forward, ms": round(1e3 * statistics.mean(forwards), 2),
        "walk to wire, ms": round(1e3 * statistics.median(report["wire"]), 2),
    }


def measure(arguments: argparse.Namespace, how: str, size: int, is_drafted: bool) -> dict[str, Any]:
    """Measure one cell in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        config, out = root / "null.yaml", root / "steps.json"
        config.write_text(_CONFIG.replace("BUDGET", arguments.budget), "utf-8")
        python, processes = sys.executable, []

        def start(*words: str) -> PinnedProcess:
            command = [python, "-m", *words]
            processes.append(PinnedProcess(command, _CORES, root / f"{len(processes)}.log"))
            return processes[-1]

        relay, is_over = None, threading.Event()
        try:
            target = start(
                "benchmarks.rounds.null_target",
                "--how",
                how,
                "--out",
                str(out),
                "--budget",
                arguments.budget,
            )
            drafter = start(
                "cluster.worker", "draft", str(config), "pool", "--log-level", "WARNING"
            )
            address = target.ready_address()
            if arguments.delay_ms:
                relay = _Relay(address, 1e-3 * arguments.delay_ms)
                address = relay.address
            lead = start(
                "cluster.lead",
                str(config),
                "--target",
                address,
                "--drafter",
                f"pool={drafter.ready_address()}",
                "--log-level",
                "WARNING",
            )
            coordinator = lead.ready_address()
            time.sleep(1.0)  # until all processes have joined
            if arguments.pause_ms:
                threading.Thread(
                    target=_pauses, args=(lead, 1e-3 * arguments.pause_ms, is_over), daemon=True
                ).start()
            asyncio.run(_ask(coordinator, _requests(size, arguments.tokens, is_drafted, 0)))
        finally:
            is_over.set()
            for process in reversed(processes):
                process.stop()
            if relay is not None:
                relay.stop()
        return _period(json.loads(out.read_text("utf-8")), size)


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add_options(
        parser,
        sizes=[1, 8, 32],
    )
    add("--how", choices=["asleep", "spinning"], nargs="*", default=["asleep", "spinning"])
    add("--budget", choices=["fixed", "adaptive"], default="fixed")
    add_options(
        parser,
        tokens=(600, "of each text"),
        delay_ms=0.0,
        pause_ms=0.0,
    )
    add("--drafts", choices=["without", "with"], nargs="*", default=["without", "with"])
    arguments = parser.parse_args()
    report = {
        f"{how}, {size} texts, {drafts} drafts": measure(arguments, how, size, drafts == "with")
        for how in arguments.how
        for size in arguments.sizes
        for drafts in arguments.drafts
    }
    name = "delay" if arguments.delay_ms else "pause" if arguments.pause_ms else "period"
    show_report(OUT / f"rounds/{name}.json", report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
