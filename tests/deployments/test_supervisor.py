"""The process above the one that runs Ray: what it says, and what is left where it is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from deployments.supervisor import short_lived_folder
from tests.conftest import REPOSITORY, python
from tests.deployments.conftest import DEADLINE_S, wait_until
from tests.support.deployments.command import running

RAISES = """
import sys
from deployments.supervisor import supervised

def body(folder):
    raise TypeError("not a number")

sys.exit(supervised(body))
"""
RUNS = """
import os, subprocess, sys, time
from deployments.supervisor import supervised

def body(folder):
    # It ends with nobody by itself, as Ray's agents.
    left = subprocess.Popen(["sleep", "1000"])
    print(os.getpid(), left.pid, folder, flush=True)
    time.sleep(1000)

sys.exit(supervised(body))
"""
KILLED = """
import os
from deployments.supervisor import short_lived_folder

with short_lived_folder() as folder:
    (folder / "dashboard-token").write_text("secret")
    print(folder, flush=True)
    os.kill(os.getpid(), 9)
"""
ENDS = """
import subprocess
from deployments import supervisor
from cluster.worker.priority import adopt_orphans
from deployments.supervisor import end_descendants
adopt_orphans()
left = subprocess.Popen(["sleep", "1000"])
supervisor._PATIENCE_S = -1000.0  # none at all
end_descendants(1000.0)
assert left.poll() is None
supervisor._PATIENCE_S = 10.0
end_descendants(0.0)
assert left.poll() is not None
"""


@contextmanager
def launched() -> Iterator[tuple[subprocess.Popen[str], int, int, Path]]:
    """A supervisor that runs; the pids of its child and of what that starts, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", RUNS],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as launcher:
        child, left, folder = launcher.stdout.readline().split()
        yield launcher, int(child), int(left), Path(folder)


def test_what_the_child_raises_is_printed_before_its_end():
    done = python("-c", RAISES)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("TypeError: not a number")


def test_after_a_kill_of_both_processes_nothing_is_left():
    with launched() as (launcher, child, left, folder):
        assert folder.is_dir()
        assert running(left)
        for pid in (launcher.pid, child):
            os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not running(left) and not folder.exists(), 60.0)


def test_a_stop_takes_the_guard_along():
    with launched() as (launcher, _, left, folder):
        below = [each.pid for each in psutil.Process(launcher.pid).children()]
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(DEADLINE_S)
    assert len(below) == 2
    assert not any(map(running, [*below, left]))
    assert not folder.exists()


def test_a_folder_that_a_killed_server_left_goes_at_the_next_start():
    left = Path(python("-c", KILLED).stdout.strip())
    assert (left / "dashboard-token").is_file()
    with short_lived_folder() as one, short_lived_folder() as other:
        assert not left.exists()
        # Those of living servers stay.
        assert one.is_dir()
        assert other.is_dir()
    assert not one.exists()


def test_what_runs_below_is_ended_and_waited_for_within_bounds():
    found = python("-c", ENDS)
    assert found.returncode == 0, found.stderr
