"""Ranks fall back together or not at all; loading may take long, a collective may not."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from cluster.engine.cpu import kernels

TIMEOUT_S = 300
needs_native = pytest.mark.skipif(kernels.load() is None, reason="this machine has no C++ compiler")


@contextmanager
def two_ranks(scenario: str, folder: Path) -> Iterator[list[subprocess.Popen[str]]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "tests.support.engine.vote_process", scenario]
    processes = [
        subprocess.Popen(
            [*command, rank, address, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in "01"
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def settled(scenario: str, folder: Path) -> list[dict[str, Any]]:
    with two_ranks(scenario, folder) as processes:
        return [json.loads(each.communicate(timeout=TIMEOUT_S)[0]) for each in processes]


@needs_native
def test_all_ranks_fall_back_where_the_check_of_one_fails(llama_folder: Path) -> None:
    first, second = settled("one", llama_folder)
    assert first["attention"] == second["attention"] == "sdpa"
    # Both have run both checks: a collective of one alone would have had no end.
    assert first["checks"] == second["checks"] == 2
    assert "another rank" in first["fallbacks"][0]
    assert "a layer is wrong" in second["fallbacks"][0]


@needs_native
def test_no_rank_falls_back_where_all_are_right(llama_folder: Path) -> None:
    for each in settled("right", llama_folder):
        assert each == {"attention": "native", "fallbacks": [], "checks": 1}


@needs_native
@pytest.mark.parametrize(("scenario", "checks"), [("chosen", 1), ("never", 2)])
def test_all_ranks_refuse_where_there_is_nothing_to_fall_back_to(
    scenario: str, checks: int, llama_folder: Path
) -> None:
    first, second = settled(scenario, llama_folder)
    assert "another rank" in first["error"] or scenario == "never"
    assert second["error"] == "a layer is wrong"
    assert first["checks"] == second["checks"] == checks


def test_a_rank_may_load_for_longer_than_a_collective_may_take(llama_folder: Path) -> None:
    with two_ranks("late", llama_folder) as (leader, follower):
        assert leader.stdout is not None
        assert leader.stdout.readline().strip() == "loaded"
        # While the other is alive and silent.
        assert leader.stdout.readline().strip() == "worker_error"
        assert follower.poll() is None
