"""Says in the log how far a model's loading is."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import psutil

from cluster.models.weights import weights_files

log = logging.getLogger(__name__)

Phase = Literal["load", "warm", "profile"]

# What loads sooner says nothing of its weights.
_EVERY_S = 2.0


def begin(phase: Phase) -> None:
    """Say that a phase begins: load reads the weights, warm captures graphs, profile measures."""
    log.info("phase %(phase)s", {"phase": phase})


@contextlib.contextmanager
def telling_of_weights(folder: Path) -> Iterator[None]:
    """Inside, say every two seconds how much of the weights in `folder` this process has read."""
    begin("load")
    found = filter(Path.is_file, weights_files(folder))
    sizes = {str(path.resolve()): path.stat().st_size for path in found}
    is_over = threading.Event()

    def tell() -> None:
        read: dict[str, int] = {}
        while not is_over.wait(_EVERY_S):
            resident = _resident()
            for path, size in sizes.items():
                if path in resident:
                    # A mapping may begin or end within a page.
                    read[path] = min(size, max(read.get(path, 0), resident[path]))
                elif path in read:
                    read[path] = size  # what is mapped no more has been read
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


def _resident() -> Mapping[str, int]:
    """Return for each file that is mapped the bytes of it that are in memory."""
    with contextlib.suppress(OSError, AttributeError, psutil.Error):  # a system that does not say
        return {each.path: each.rss for each in psutil.Process().memory_maps()}
    return {}
