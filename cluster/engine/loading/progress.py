"""Says in the log how far a model's loading is."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Literal

from cluster.models.weights import PICKLED, SAFETENSORS

log = logging.getLogger(__name__)

Phase = Literal["load", "warm", "profile"]

# What loads sooner says nothing of its weights.
_EVERY_S = 2.0
_MAPPINGS = Path("/proc/self/smaps")


def begin(phase: Phase) -> None:
    """Say that a phase begins: load reads the weights, warm captures graphs, profile measures."""
    log.info("phase %(phase)s", {"phase": phase})


@contextlib.contextmanager
def telling_of_weights(folder: Path) -> Iterator[None]:
    """Inside, say every two seconds how much of the weights in `folder` this process has read."""
    begin("load")
    found = next(filter(None, (list(folder.glob(each)) for each in (SAFETENSORS, PICKLED))), [])
    sizes = {str(path.resolve()): path.stat().st_size for path in found}
    is_over = threading.Event()

    def tell() -> None:
        read: dict[str, int] = {}
        while not is_over.wait(_EVERY_S):
            read = read_so_far(read, _resident(sizes), sizes)
            log.info(
                "phase %(phase)s: %(read_mb)d of %(total_mb)d MB of weights read",
                {
                    "phase": "load",
                    "read_mb": sum(read.values()) // 10**6,
                    "total_mb": sum(sizes.values()) // 10**6,
                },
            )

    thread = threading.Thread(target=tell, name="progress of loading", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def read_so_far(
    before: Mapping[str, int], resident: Mapping[str, int], sizes: Mapping[str, int]
) -> dict[str, int]:
    """Return the bytes read of each file, given those before and those mapped and in memory now.

    A file that is mapped no more has been read."""
    found = dict(before)
    for path, size in sizes.items():
        if path in resident:
            # A mapping may begin or end within a page.
            found[path] = min(size, max(found.get(path, 0), resident[path]))
        elif path in found:
            found[path] = size
    return found


def _resident(files: Collection[str]) -> Mapping[str, int]:
    """Return for each of the files that is mapped the bytes of it that are in memory."""
    found = Counter[str]()
    path = ""
    with contextlib.suppress(OSError), _MAPPINGS.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            fields = line.split(None, 5)
            if fields[0][0] in "0123456789abcdef":  # the first line of a mapping
                path = fields[5].rstrip("\n") if len(fields) == 6 else ""
            elif fields[0] == "Rss:" and path in files:
                found[path] += 1024 * int(fields[1])
    return found
