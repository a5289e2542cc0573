"""Loads a checkpoint in a process of its own and prints how much more memory that took at its peak.

    python -m tests.support.engine.loading_process WARM_FOLDER FOLDER

WARM_FOLDER is loaded first, so that libraries and threads are there.  Prints bytes: the most that
was resident while FOLDER was loaded, and what was afterwards, both beyond what was before.
"""

import sys
from pathlib import Path

from tests.support.engine.driver import load_engine


def main() -> None:
    warm, folder = map(Path, sys.argv[1:])
    load_engine(warm, dtype="bfloat16")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before, _ = _resident()
    engine = load_engine(folder, dtype="bfloat16")
    after, peak = _resident()
    assert engine.pages_in_use == 0
    sys.stdout.write(f"{peak - before} {after - before}\n")


def _resident() -> tuple[int, int]:
    """Bytes now, and at most."""
    lines = Path("/proc/self/status").read_text("ascii").splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return tuple(int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))


if __name__ == "__main__":
    main()
