"""Standing back: of a thread, and of the session's scheduling group where the process leads one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

GROUP = Path("/proc/self/autogroup")
SCRIPT = """
import os
from pathlib import Path
from cluster.worker.priority import stand_back
stand_back({nice})
group = Path("/proc/self/autogroup")
print(os.nice(0), group.read_text().split()[-1] if group.is_file() else "none")
"""


def after(nice: int, *, leads: bool) -> tuple[int, str]:
    """(the thread's nice value, the group's) in a process of its own."""
    command = [sys.executable, "-c", SCRIPT.format(nice=nice)]
    done = subprocess.run(
        command, start_new_session=leads, check=True, capture_output=True, text=True
    )
    own, group = done.stdout.split()
    return int(own), group


def test_nobody_stands_back_by_nothing() -> None:
    before, group = after(0, leads=False)
    assert after(0, leads=True)[0] == before
    assert after(5, leads=False) == (min(before + 5, 19), group)


@pytest.mark.skipif(not GROUP.is_file(), reason="the kernel groups no sessions")
def test_a_leader_of_a_session_lowers_its_group_and_others_leave_theirs() -> None:
    shared = GROUP.read_text().split()[-1]
    assert after(7, leads=True)[1] == "7"
    assert after(7, leads=False)[1] == shared
