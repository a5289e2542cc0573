"""Ranks of a target are its children: who ends or falls silent is noticed, and nobody is left."""

import asyncio
import os
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cluster.config.schema import Config, EngineConfig, TargetConfig
from cluster.errors import WorkerError
from cluster.worker import ranks
from cluster.worker.ranks import Ranks

THREE = Config(target=TargetConfig(engine=EngineConfig(tensor_parallel=3)))
BEAT = "import os, time; os.write(0, b'\\0')"


@pytest.fixture
def playing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Ranks]:
    """Three ranks, of which two run this program in place of their own."""
    monkeypatch.setattr(ranks, "_LOOK_S", 0.05)

    def play(program: str) -> Ranks:
        python = tmp_path / "python"
        (tmp_path / "program.py").write_text(program)
        python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/program.py\n")
        python.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(python))
        return Ranks(THREE)

    return play


async def test_a_rank_that_ends_while_the_others_load_is_noticed_with_its_reason(
    playing: Callable[[str], Ranks],
):
    found, is_over = (
        playing(f"{BEAT}; os.write(0, b'no space left'); os._exit(1)"),
        threading.Event(),
    )
    with pytest.raises(WorkerError, match=r"rank [12] of the target has ended: no space left"):
        await found.load(lambda leader: is_over.wait(60))  # in a collective, for hours
    is_over.set()
    assert not any(map(_lives, found.pids))


async def test_what_loads_is_given_while_the_ranks_live(playing: Callable[[str], Ranks]):
    found = playing(f"{BEAT}; time.sleep(60)")
    assert (await found.load(lambda leader: leader)).startswith("127.0.0.1:")
    assert all(map(_lives, found.pids))
    found._kill()
    assert not any(map(_lives, found.pids))


async def test_a_rank_that_says_nothing_is_noticed_and_one_that_is_late_is_not(
    playing: Callable[[str], Ranks],
):
    late = "while True:\n os.write(0, b'\\0'); time.sleep(0.3)"
    found = playing(f"import os, time\n{late}")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(found.watch(2.0), 3.0)
    found._kill()
    found = playing(f"{BEAT}; time.sleep(60)")
    with pytest.raises(WorkerError, match=r"rank [12] of the target has said nothing for 0\.2 s"):
        await found.watch(0.2)
    assert not any(map(_lives, found.pids))


async def test_ranks_that_end_with_rank_0_are_no_fault(playing: Callable[[str], Ranks]):
    found = playing("pass")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(found.watch(0.5), 2.0)
    found.stop()


def test_ranks_end_with_the_process_that_started_them_however_it_ends():
    program = """
        import time
        from tests.worker.test_ranks import THREE
        from cluster.worker.ranks import Ranks
        print(*Ranks(THREE).pids, flush=True)
        time.sleep(60)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2
        time.sleep(1.0)  # they import what ranks need
        parent.kill()
    end = time.monotonic() + 60.0
    while any(map(_lives, pids)):
        assert time.monotonic() < end, "a rank has outlived its target"
        time.sleep(0.1)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return "zombie" not in Path(f"/proc/{pid}/status").read_text()
    except (OSError, FileNotFoundError):
        return False
