"""Ends what a killed server has left: `python -m deployments.guard SESSION FOLDER`.

Its standard input ends when nobody is left who would do so: neither the command nor the process
below it that runs Ray.  Most of Ray's processes end by themselves then, its agents a minute later.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from deployments.processes import end_session

# Processes that have just seen the end of their parent are given so long.
_GRACE_S = 3.0


def start_guard(alive: int, session: int, folder: Path) -> subprocess.Popen[bytes]:
    """A process that outlives this one.  alive: the end of a pipe to read, whose other end those
    hold who are watched."""
    return subprocess.Popen(
        [sys.executable, "-m", "deployments.guard", str(session), str(folder)],
        cwd=Path(__file__).resolve().parents[1],
        stdin=alive,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def main() -> None:
    session, folder = int(sys.argv[1]), Path(sys.argv[2])
    sys.stdin.buffer.read()
    end_session(session, _GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
