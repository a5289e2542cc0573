"""A target worker whose device is fake: `python -m benchmarks.simulate.fake_target RECORDING`.

A step takes the time of its rows by a profile, asleep, and its logits say what the recorded text
says next.  All the rest is the product's own: the step loop, its planner, draws, walks, gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from benchmarks.rounds.null_engine import NullEngine
from benchmarks.simulate.recording import Recording
from cluster.config.schema import CoordinatorConfig
from cluster.engine.work import Output, StepSummary, Work
from cluster.messages import AdapterList, WorkerDescription
from cluster.plan.controller import Controller
from cluster.rpc.server import serve_target
from cluster.rpc.standalone import run_until_signal
from cluster.spec.step_profile import StepProfile
from cluster.spec.tree import depths
from cluster.worker.priority import freeze_gc, shorten_switch_interval
from cluster.worker.residents import Residents
from cluster.worker.target import TargetWorker
from cluster.worker.verifier import Verifier

SEATS = 64
MAX_ROWS = 512
# A device whose steps take 20 ms until computing catches up with reading the weights.
ROWS = (1, 64, 128, 256, 512, 1024)
TIMES_MS = (20.0, 20.2, 20.6, 21.6, 40.0, 78.0)


class RecordedEngine(NullEngine):
    """Writes recorded texts."""

    def __init__(self, recording: Recording, profile: StepProfile) -> None:
        super().__init__(time.sleep, 0.0)
        self.vocab_size = recording.vocab_size
        self._recording = recording
        self._profile = profile
        self._numbers: dict[str, int] = {}  # of the texts, by request
        self._read: dict[str, int] = {}  # rows of prompts that are not read to their ends

    def step(self, taps: Sequence[int] = ()) -> list[Output]:
        began = time.perf_counter()
        num_rows, num_prompt_rows, works = self._take_works()
        outputs = [self._answer(work) for work in works]
        # The device's time: what the logits took here is a part of it.
        time_s = float(self._profile.at([num_rows])[0])
        time.sleep(max(began + time_s - time.perf_counter(), 0.0))
        self.last_step = StepSummary(
            num_rows=num_rows, num_prefill_rows=num_prompt_rows, num_sequences=len(works),
            num_nodes=sum(len(work.tree) for work in works), forward_time_s=time_s,
        )  # fmt: skip
        return outputs

    def _take_works(self) -> tuple[int, int, list[Work]]:
        """Return the rows of the step, those of prompts, and the works that it completes: prompts
        get what room the others leave, the first ones first."""
        num_rows = num_prompt_rows = 0
        done = []
        for work in sorted(self._queue.values(), key=lambda work: work.base_len == 0):
            lacking = work.num_logit_rows - 1 + len(work.delta) - self._read.get(work.request_id, 0)
            rows = lacking if work.base_len else min(lacking, max(MAX_ROWS - num_rows, 0))
            num_rows += rows
            num_prompt_rows += rows * (work.base_len == 0)
            if rows == lacking:
                done.append(work)
                self._read.pop(work.request_id, None)
                del self._queue[work.request_id]
            else:
                self._read[work.request_id] = self._read.get(work.request_id, 0) + rows
        return num_rows, num_prompt_rows, done

    def _answer(self, work: Work) -> Output:
        if work.base_len == 0:
            self._numbers[work.request_id] = int(work.delta[0])
        text = self._recording.texts[self._numbers[work.request_id]]
        self._lengths[work.request_id] = work.context_len
        start = work.context_len - text.prompt_len
        places = np.concatenate(([0], depths(work.tree.parents))).astype(np.int64) + start
        told = text.token_ids[np.minimum(places, len(text.token_ids) - 1)]
        logits = torch.full((len(places), self.vocab_size), -10.0)
        logits[torch.arange(len(places)), torch.from_numpy(told.astype(np.int64))] = 10.0
        return Output(work.request_id, logits)

    def release(self, request_id: str) -> None:
        super().release(request_id)
        self._numbers.pop(request_id, None)
        self._read.pop(request_id, None)


def _worker(recording: Recording, name: str, max_draft_tokens: int) -> TargetWorker:
    profile = StepProfile.of(ROWS, [1e-3 * each for each in TIMES_MS])
    assert profile is not None
    engine, residents = RecordedEngine(recording, profile), Residents([])
    description = WorkerDescription(
        name, "target", "fake", vocab_size=recording.vocab_size, max_running_sequences=SEATS,
        max_context_len=engine.max_context_len, max_batch_tokens=MAX_ROWS,
    )  # fmt: skip
    worker = TargetWorker(
        Verifier(cast(Any, engine)), description, Controller(CoordinatorConfig(), profile),
        residents, max_draft_tokens=max_draft_tokens,
    )  # fmt: skip
    worker.streams.announce(AdapterList())
    return worker


async def _serve(worker: TargetWorker) -> None:
    server = await serve_target(worker, "127.0.0.1", 0)
    await run_until_signal(server, "target", lambda: worker.healthy)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.simulate.fake_target", description=__doc__)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--name", default="fake")
    arguments = parser.parse_args()
    limit = CoordinatorConfig().max_draft_tokens
    worker = _worker(Recording.read(arguments.recording), arguments.name, limit)
    torch.set_num_threads(1)
    shorten_switch_interval()
    freeze_gc()
    worker.start()
    try:
        asyncio.run(_serve(worker))
    finally:
        worker.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
