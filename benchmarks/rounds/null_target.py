"""A target worker over `NullEngine`, as a process: `python -m benchmarks.rounds.null_target`.

It serves gRPC like any other until SIGTERM, and then writes when its steps began and ended, and how
long after each walk the verdict was handed to gRPC.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from benchmarks.rounds.null_engine import VOCAB_SIZE, NullEngine, asleep, spinning
from benchmarks.support.options import add_options, parser_of
from cluster.config.schema import Config, CoordinatorConfig, DrafterConfig
from cluster.draft import registry
from cluster.draft.base import DrafterContext
from cluster.draft.breaker import CircuitBreaker
from cluster.rpc.messages import WorkerDescription
from cluster.rpc.server import ServerStream, run_until_signal, serve_worker
from cluster.spec.step_profile import StepProfile
from cluster.worker.draft_profile import profile_drafting
from cluster.worker.priority import freeze_gc, shorten_switch_interval
from cluster.worker.residents import ResidentDrafter, Residents
from cluster.worker.target import TargetWorker
from cluster.worker.texts import TargetText
from cluster.worker.verifier import StepAnswers, Verifier

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class _Wire:
    """Times from the end of a step's walks until gRPC has taken the verdicts' frame, in seconds."""

    def __init__(self, verifier: Verifier) -> None:
        self.times_s: list[float] = []
        self._walked_at = 0.0  # 0 = the frame of the last step has been written
        step, write = verifier.step, ServerStream.write

        def timed_step(ahead: Sequence[TargetText] = ()) -> StepAnswers:
            stepped = step(ahead)
            self._walked_at = time.perf_counter()
            return stepped

        async def timed_write(stream: ServerStream, data: bytes) -> None:
            await write(stream, data)
            walked_at, self._walked_at = self._walked_at, 0.0
            if walked_at:
                self.times_s.append(time.perf_counter() - walked_at)

        cast(Any, verifier).step = timed_step
        cast(Any, ServerStream).write = timed_write


def _residents() -> Residents:
    settings = DrafterConfig(kind="suffix")
    drafter = registry.create("suffix", settings, DrafterContext("suffix", 16, 64))
    return Residents([ResidentDrafter("suffix", drafter, VOCAB_SIZE, CircuitBreaker(3, 2.0))])


def build(engine: NullEngine, verifier: Verifier, budget: str, forward_s: float) -> TargetWorker:
    """The worker, not yet started."""
    residents = _residents()
    config = CoordinatorConfig(budget=cast(Any, budget), max_draft_tokens=4)
    profile = StepProfile.of(_ROWS, [forward_s] * len(_ROWS))
    times = profile_drafting(verifier, residents, VOCAB_SIZE, 64) if budget == "adaptive" else ()
    engine.steps.clear()
    description = WorkerDescription(
        "null-target",
        "target",
        "null",
        vocab_size=VOCAB_SIZE,
        max_context_len=engine.max_context_len,
        max_running_sequences=64,
        max_batch_tokens=512,
        residents=residents.names,
    )
    parts: Any = SimpleNamespace(
        engine=engine,
        engines=(),
        residents=residents,
        verifier=verifier,
        profile=profile,
        draft_times=times,
    )
    return TargetWorker(parts, Config(coordinator=config), description)


async def _serve(worker: TargetWorker) -> None:
    server = await serve_worker(worker, "127.0.0.1", 0)
    await run_until_signal(server, "target", lambda: worker.is_healthy)


def main() -> int:
    parser = parser_of(__doc__)
    add_options(
        parser,
        forward_ms=8.0,
    )
    parser.add_argument("--how", choices=["asleep", "spinning"], default="asleep")
    parser.add_argument("--budget", choices=["fixed", "adaptive"], default="fixed")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    forward_s = 1e-3 * arguments.forward_ms
    engine = NullEngine({"asleep": asleep, "spinning": spinning}[arguments.how], forward_s)
    verifier = Verifier(engine)
    wire = _Wire(verifier)
    worker = build(engine, verifier, arguments.budget, forward_s)
    shorten_switch_interval()
    freeze_gc()
    worker.start()
    try:
        asyncio.run(_serve(worker))
    finally:
        worker.stop()
        arguments.out.write_text(json.dumps({"steps": engine.steps, "wire": wire.times_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
