"""Standing back: of a thread, and of the session's scheduling group where the process leads one."""

import gc
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cluster.worker import priority
from cluster.worker.build import devices_of

SCRIPT = """
import os
from pathlib import Path
from cluster.worker.priority import lower_priority
lower_priority({nice})
group = Path("/proc/self/autogroup")
words = group.read_text().split() if group.is_file() else []
print(os.nice(0), words[-1] if words else "none")
"""


def after(nice: int, *, leads: bool) -> tuple[int, str]:
    """(the thread's nice value, the group's) in a process of its own."""
    command = [sys.executable, "-c", SCRIPT.format(nice=nice)]
    own, group = subprocess.check_output(command, start_new_session=leads, text=True).split()
    return int(own), group


def may_lower_a_group() -> bool:
    """Whether this kernel has such groups, and lets a session's leader lower its own."""
    script = (
        "from pathlib import Path\n"
        "group = Path('/proc/self/autogroup')\n"
        "group.write_text('3')\n"
        "assert group.read_text().split()[-1] == '3'\n"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, start_new_session=True, check=False, capture_output=True)
    return done.returncode == 0


def test_a_thread_stands_back_and_a_leader_of_a_session_lowers_its_group_too():
    before, group = after(0, leads=False)
    assert after(0, leads=True)[0] == before
    assert after(5, leads=False) == (min(before + 5, 19), group)
    if not may_lower_a_group():
        pytest.skip("sessions have no groups here, or may not lower them")
    assert after(7, leads=True)[1] == "7"


@pytest.mark.parametrize("text", ["", "none of the usual\n", None])
def test_a_session_without_a_group_costs_nothing(
    text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    group = tmp_path / "autogroup"
    if text is not None:
        group.write_text(text)
    monkeypatch.setattr(priority, "_AUTOGROUP", group)
    monkeypatch.setattr(priority.os, "nice", lambda nice: nice)
    monkeypatch.setattr(priority.os, "getsid", lambda pid: priority.os.getpid())
    priority.lower_priority(7)
    assert (group.read_text() if group.exists() else None) == text


def test_what_is_loaded_is_not_looked_through_again():
    loaded = [[index] for index in range(1000)]
    try:
        priority.freeze_gc()
        assert gc.get_freeze_count() >= len(loaded)
        # Only what was made since is.
        assert len(gc.get_objects()) < len(loaded)
    finally:
        gc.unfreeze()


def test_imports_collect_no_garbage_and_leave_no_more_to_look_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "imported_for_the_first_time.py").write_text("held = [[i] for i in range(1000)]")
    monkeypatch.syspath_prepend(tmp_path)
    before = gc.get_freeze_count()
    try:
        with priority.importing():
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() == before  # nothing was imported
        with priority.importing():
            import_module("imported_for_the_first_time")
        assert gc.get_freeze_count() >= before + 1000
    finally:
        gc.unfreeze()


# What a worker says it computes on.


def on(device: str, tensor_parallel: int = 1) -> Any:
    config = SimpleNamespace(tensor_parallel=tensor_parallel)
    return SimpleNamespace(device=torch.device(device), config=config)


def test_cores_are_those_the_process_may_use():
    allowed = os.sched_getaffinity(0)
    everything = devices_of()
    assert len(set(everything)) == len(allowed)
    assert devices_of(on("cpu")) == everything
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert devices_of() == everything[:1]
    finally:
        os.sched_setaffinity(0, allowed)


def test_gpus_are_told_apart_by_what_they_are_and_not_by_their_number(
    monkeypatch: pytest.MonkeyPatch,
):
    shown = ["uuid-a", "uuid-b"]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(shown))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=shown[index])
    )
    first, second = devices_of(on("cuda")), devices_of(on("cuda:1"))
    assert len(first) == len(second) == 1
    assert set(first).isdisjoint(second)
    assert devices_of(on("cuda", tensor_parallel=2)) == first + second
    shown.reverse()  # another process, which is shown them in another order
    assert devices_of(on("cuda")) == second
    assert set(first).isdisjoint(devices_of())
