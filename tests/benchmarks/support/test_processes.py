"""Measured processes are pinned, and stopped with their children; requests keep their level."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.support.processes import PinnedProcess
from benchmarks.support.record import ROOT
from tests.support.deployments.command import running

CORE = min(os.sched_getaffinity(0))
_SAY_AND_WAIT = "import os, sys; print(sorted(os.sched_getaffinity(0)), flush=True); input()"
_PARENT = (
    "import subprocess, sys; child = subprocess.Popen(['sleep', '60']);"
    "print(child.pid, flush=True); input()"
)
_SCRIPT = """
import sys, time
from pathlib import Path
from benchmarks.support.processes import PinnedProcess, exit_on_sigterm
exit_on_sigterm()
process = PinnedProcess(
    [sys.executable, "-u", "-c", "import os; print(os.getpid()); input()"], [0], Path(sys.argv[1])
)
try:
    print(process.read_line(), flush=True)
    time.sleep(600)
finally:
    process.stop()
"""


def test_sigterm_ends_a_benchmark_with_its_processes(tmp_path: Path):
    benchmark = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "log")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    child = int(benchmark.stdout.readline())
    assert running(child)
    benchmark.send_signal(signal.SIGTERM)
    assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not running(child)


def start(code: str, log: Path) -> PinnedProcess:
    return PinnedProcess([sys.executable, "-c", code], [CORE], log / "log")


def test_a_process_has_its_cores_only(tmp_path: Path):
    process = start(_SAY_AND_WAIT, tmp_path)
    assert process.read_line() == f"[{CORE}]"
    process.stop()


def test_stopping_leaves_no_descendant(tmp_path: Path):
    process = start(_PARENT, tmp_path)
    child = int(process.read_line())
    assert running(child)
    process.stop(patience_s=0.2)
    assert not running(child)


def test_a_process_that_ends_early_raises_an_error_with_its_last_output(tmp_path: Path):
    process = start("raise SystemExit('no such model')", tmp_path)
    with pytest.raises(RuntimeError, match="no such model"):
        process.read_line()
    process.stop()
