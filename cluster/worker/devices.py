"""Names of the devices that a worker computes on; every worker uses the same names.

Two workers without a common device do not slow each other down.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
# Heads of a multiple of it are attended in the same lanes on every processor.
_ALIKE_HEADS = 16


def devices_of(engine: Any = None) -> tuple[str, ...]:
    """The GPUs of `engine` (`cluster.engine.engine.Engine`), or the cores this process may use.

    Containers on one machine see the same names of cores, and do not know which ones they get.
    """
    host, device = _host(), getattr(engine, "device", None)
    if device is None or device.type != "cuda":
        return tuple(f"{host}/cpu{core}" for core in sorted(os.sched_getaffinity(0)))
    import torch

    first = torch.cuda.current_device() if device.index is None else device.index
    # The ranks of a group use all GPUs that the process sees.
    is_group = engine.config.tensor_parallel > 1
    indices = range(torch.cuda.device_count()) if is_group else (first,)
    found = [(index, torch.cuda.get_device_properties(index)) for index in indices]
    # A GPU's index differs between processes that see different GPUs.
    return tuple(f"{host}/gpu-{getattr(gpu, 'uuid', index)}" for index, gpu in found)


def _host() -> str:
    try:
        return _BOOT_ID.read_text("ascii").strip()
    except OSError:  # another system than Linux
        return socket.gethostname()


def native_build(engine: Any = None) -> str:
    """Return which machine code of ours `engine` runs, "" = none; see `cluster.cpp.Native`.  The
    sources alone where its bits are the same on every processor (docs/exactness.md)."""
    device = getattr(engine, "device", None)
    if device is None or device.type != "cpu":
        return ""
    from cluster.engine.cpu import kernels

    native = kernels.load()
    if native is None:
        return ""
    is_whole = engine.config.reproducible and engine.model.native is not None
    is_alike = is_whole and all(each.head_dim % _ALIKE_HEADS == 0 for each in engine.layers)
    return f"sources-{native.sources}" if is_alike else native.build
