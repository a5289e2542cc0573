"""Measured processes are pinned, stopped with their children; `transformers` continues texts."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.rounds.null_workers import NullTarget, text
from benchmarks.spec_bench.client import Turn
from benchmarks.spec_bench.peers.engines import Conversations
from benchmarks.spec_bench.peers.transformers_peer import Engine as TransformersEngine
from benchmarks.support.by_hand import complete
from benchmarks.support.processes import PinnedProcess, is_alive
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import Request, SamplingParams
from cluster.rpc.memory import memory_pair
from tests.support.checkpoints import tiny_checkpoint

CORE = min(os.sched_getaffinity(0))
_SAY_AND_WAIT = "import os, sys; print(sorted(os.sched_getaffinity(0)), flush=True); input()"
_PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '60']);"
    "print(child.pid, flush=True); input()"
)


def start(code: str, log: Path) -> PinnedProcess:
    return PinnedProcess([sys.executable, "-c", code], [CORE], log / "log")


def test_a_process_has_its_cores_only(tmp_path: Path) -> None:
    process = start(_SAY_AND_WAIT, tmp_path)
    assert process.read_line() == f"[{CORE}]"
    process.stop()


def test_stopping_leaves_no_descendant(tmp_path: Path) -> None:
    process = start(_PARENT, tmp_path)
    child = int(process.read_line())
    assert is_alive(child)
    process.stop(patience_s=0.2)
    assert not is_alive(child)


def test_a_process_that_ends_early_raises_an_error_with_its_last_output(tmp_path: Path) -> None:
    process = start("raise SystemExit('no such model')", tmp_path)
    with pytest.raises(RuntimeError, match="no such model"):
        process.read_line()
    process.stop()


async def test_as_many_requests_run_as_were_asked_for() -> None:
    coordinator = Coordinator(Config())
    await coordinator.start()
    target = NullTarget()
    target.keeps_frames = True
    ours, theirs = memory_pair()
    tasks = [asyncio.create_task(target.serve(theirs))]
    coordinator.add_target("null", target.describe(16), ours)
    asking, answering = memory_pair()
    tasks.append(asyncio.create_task(coordinator.serve(answering)))
    params = SamplingParams(temperature=0.0, max_tokens=12)
    requests = [Request(str(i), text(0, 5 + i), params) for i in range(7)]
    result = await complete(asking, requests, 3)
    await coordinator.stop()
    for task in tasks:
        task.cancel()
    assert [list(answer.token_ids) for answer in result.answers] == [
        text(5 + i, 12).tolist() for i in range(7)
    ]
    assert max(len(frame.verdicts) for frame in target.frames) == 3
    assert result.acceptance is None


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_transformers_continues_texts_token_by_token(
    mode: str, temperature: float, tmp_path: Path
) -> None:
    folder = str(tiny_checkpoint("llama", tmp_path / "tiny"))
    engine = TransformersEngine(
        argparse.Namespace(
            model=folder, draft=folder, mode=mode, dtype="float32", num_speculative_tokens=4
        )
    )
    questions = [
        {"id": i, "category": "code", "turns": [], "prompt": list(range(10, 20 + i))}
        for i in range(3)
    ]
    asked = {
        "questions": questions, "max_tokens": 9, "temperature": temperature, "concurrency": 2
    }  # fmt: skip
    reply = Conversations(engine, lambda: None).answer(asked)
    assert sorted(each["question_id"] for each in reply["turns"]) == [0, 1, 2]
    for turn in map(Turn.of, reply["turns"]):
        assert turn.num_tokens == 9
        assert turn.submitted_s <= turn.first_s <= turn.last_s
        if mode == "assisted" and temperature == 0:  # the drafter is the target
            assert 1 + turn.accepted / turn.steps > 1.5
        elif mode == "plain":
            assert turn.steps == 0
