"""A benchmark that is told to end stops what it has started."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.support.processes import is_alive
from benchmarks.support.record import ROOT

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


def test_sigterm_ends_a_benchmark_with_its_processes(tmp_path: Path) -> None:
    benchmark = subprocess.Popen(
        [sys.executable, "-c", _SCRIPT, str(tmp_path / "log")],
        cwd=ROOT, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert benchmark.stdout is not None
    child = int(benchmark.stdout.readline())
    assert is_alive(child)
    benchmark.send_signal(signal.SIGTERM)
    assert benchmark.wait(60) == 128 + signal.SIGTERM
    assert not is_alive(child)
