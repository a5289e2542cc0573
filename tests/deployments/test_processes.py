"""The last of a command's processes."""

from __future__ import annotations

from tests.conftest import python

PROGRAM = """
import subprocess
from deployments import processes
from deployments.processes import adopt_orphans, end_descendants
adopt_orphans()
left = subprocess.Popen(["sleep", "1000"])
processes._PATIENCE_S = -1000.0  # none at all
assert end_descendants(1000.0) is False
assert left.poll() is None
processes._PATIENCE_S = 10.0
assert end_descendants(0.0) is True
assert left.poll() is not None
"""


def test_what_runs_below_is_ended_and_waited_for_within_bounds() -> None:
    found = python("-c", PROGRAM)
    assert found.returncode == 0, found.stderr
