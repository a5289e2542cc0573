"""The share of the cores that a server or a Ray gets while it starts.

Ray gives each of its daemons 30 s to start, which is little where they import on cores that others
use.  Many kernels share the cores by session; here sessions are put before others for a while.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

BEFORE_OTHERS, LIKE_OTHERS = -15, 0


def share(pid: int, nice: int) -> None:
    """Set the niceness, among sessions, of the one that a process is in and of those that its
    children are in; nothing happens where there are no such shares, or where they may not be
    set."""
    with contextlib.suppress(OSError):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        for each in (pid, *children):
            Path(f"/proc/{each}/autogroup").write_text(str(nice))


@contextlib.contextmanager
def before_others() -> Iterator[None]:
    """This process's own session, for a Ray that starts in it."""
    share(os.getpid(), BEFORE_OTHERS)
    try:
        yield
    finally:
        share(os.getpid(), LIKE_OTHERS)
