"""A target that computes nothing, as a process: `python -m benchmarks.scale.paced_target`.

Its texts are those of `benchmarks.rounds.null_workers`.  It makes a step of all texts of each
coordinator at a fixed pace, so whoever passes its tokens on is measured at a known load.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import sys

import uvloop

from benchmarks.rounds.null_workers import NullTarget
from cluster.messages import Load, StepFrame, VerdictFrame, WorkerDescription
from cluster.rpc.link import Link
from cluster.rpc.server import serve_target
from cluster.rpc.standalone import run_until_signal

MAX_SEQUENCES = 4096
LOOK_UP = "suffix"


class _PacedTexts(NullTarget):
    """The texts of one coordinator."""

    def __init__(self, period_s: float) -> None:
        super().__init__()
        self._period_s = period_s

    async def _step_forever(self, link: Link[VerdictFrame, StepFrame]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            due = max(due + self._period_s, loop.time())
            await asyncio.sleep(due - loop.time())
            if self._lengths:
                await link.send(self.answer())


class PacedTarget:
    """Serves any number of coordinators."""

    def __init__(self, period_s: float, *, is_drafted: bool) -> None:
        """is_drafted: a step emits three tokens of each text instead of one."""
        self._period_s = period_s
        self._residents = (LOOK_UP,) if is_drafted else ()

    def describe(self) -> WorkerDescription:
        described = NullTarget().describe(MAX_SEQUENCES)
        return dataclasses.replace(described, residents=self._residents)

    async def serve(self, link: Link[VerdictFrame, StepFrame]) -> None:
        await link.send(VerdictFrame(load=Load(seats=MAX_SEQUENCES)))
        await _PacedTexts(self._period_s).serve(link)


async def _serve(arguments: argparse.Namespace) -> None:
    target = PacedTarget(1e-3 * arguments.period_ms, is_drafted=arguments.drafted)
    server = await serve_target(target, "127.0.0.1", 0)
    await run_until_signal(server, "target")


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.scale.paced_target", description=__doc__)
    parser.add_argument("--period-ms", type=float, default=40.0)
    parser.add_argument("--drafted", action="store_true")
    uvloop.run(_serve(parser.parse_args()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
