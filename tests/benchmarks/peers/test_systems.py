"""Measured processes are pinned, stopped with their children, checked to be idle, and queried."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from pathlib import Path

import pytest

from benchmarks.peers.makers import Programs
from benchmarks.peers.systems import Peer, PeerSettings
from benchmarks.peers.transformers_peer import Peer as TransformersPeer
from benchmarks.rounds.null_workers import NullTarget, text
from benchmarks.support.answers import Acceptance, Law
from benchmarks.support.by_hand import complete
from benchmarks.support.processes import PinnedProcess, check_idle, is_alive
from benchmarks.support.prompts import Prompt
from cluster.config.schema import Config
from cluster.coordinator.coordinator import Coordinator
from cluster.core import Request, SamplingParams
from cluster.rpc.memory import memory_pair
from tests.support.checkpoints import tiny_checkpoint

CORE = min(os.sched_getaffinity(0))
_SAY_AND_WAIT = "import os, sys; print(sorted(os.sched_getaffinity(0)), flush=True); input()"
_SPIN = "print('spinning', flush=True)\nwhile True: pass"
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


def test_waiting_is_idle_and_computing_is_not(tmp_path: Path) -> None:
    waiting, spinning = start(_SAY_AND_WAIT, tmp_path), start(_SPIN, tmp_path)
    try:
        waiting.read_line()
        spinning.read_line()
        check_idle({"waiting": waiting}, 0.3)
        with pytest.raises(RuntimeError, match="spinning used"):
            check_idle({"waiting": waiting, "spinning": spinning}, 0.3)
    finally:
        waiting.stop()
        spinning.stop()


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


_ECHO = """
from benchmarks.peers.protocol import serve_questions, redirect_stdout
line = redirect_stdout()
print("what a library prints is no answer")
serve_questions(line, lambda question: {
    "answers": [{"submitted": 1, "events": [[2, 1], [3, 2]], "token_ids": prompt}
                for prompt in question["prompts"]],
    "acceptance": {"steps": 2, "drafted": 8, "accepted": 3},
})
"""


def test_a_peer_answers_over_its_own_stream(tmp_path: Path) -> None:
    settings = PeerSettings(
        target="", draft="", dtype="float32", cores=(CORE,), config="", overrides=(),
        programs=Programs(), max_sequences=2, log=tmp_path,
    )  # fmt: skip
    peer = Peer("echo", [sys.executable, "-c", _ECHO], settings)
    asked = [Prompt("code", "code", (4, 5)), Prompt("code", "code", (6, 7))]
    peer.start()
    try:
        results = [peer.run(asked, 2, Law.parse("t0.8"), 1, seed) for seed in (1, 2)]
    finally:
        peer.stop()
    for result in results:
        assert [answer.token_ids for answer in result.answers] == [(4, 5), (6, 7)]
        assert result.acceptance == Acceptance(2, 8, 3)


@pytest.mark.parametrize("mode", ["plain", "assisted", "lookup"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_transformers_answers_with_a_stamp_for_every_arrival(
    mode: str, temperature: float, tmp_path: Path
) -> None:
    folder = str(tiny_checkpoint("llama", tmp_path / "tiny"))
    peer = TransformersPeer(
        argparse.Namespace(
            model=folder, draft=folder, mode=mode, dtype="float32", num_speculative_tokens=4
        )
    )
    prompts = [list(range(10, 20 + i)) for i in range(2)]
    reply = peer.answer(
        {
            "prompts": prompts, "max_tokens": 9, "temperature": temperature, "seed": 1,
            "concurrency": 2 if mode == "plain" else 1,
        }
    )  # fmt: skip
    for answer in reply["answers"]:
        counts = [count for _, count in answer["events"]]
        assert len(answer["token_ids"]) == counts[-1] == 9
        assert counts == sorted(set(counts))
    if mode == "assisted" and temperature == 0:  # the drafter is the target
        assert Acceptance(**reply["acceptance"]).mean_length > 1.5


def test_transformers_does_not_speculate_for_a_batch(tmp_path: Path) -> None:
    folder = str(tiny_checkpoint("llama", tmp_path / "tiny"))
    peer = TransformersPeer(
        argparse.Namespace(
            model=folder, draft=folder, mode="assisted", dtype="float32", num_speculative_tokens=4
        )
    )
    with pytest.raises(ValueError, match="one sequence at a time"):
        peer.answer({"prompts": [[5], [6]], "concurrency": 2, "seed": 1})
