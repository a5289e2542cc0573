"""The threads of a worker process: how many, and whose."""

from __future__ import annotations

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.cpu import kernels
from cluster.engine.device import num_cores, resolve_device

# Whether this process's threads were set by us.
_are_ours = False


def configure_threads(config: EngineConfig) -> int:
    """Set the threads of this process's products and return how many there are.

    Call it once at the start of a worker process, never in a library: it is process-wide, and
    Ray starts actors of less than one CPU with OMP_NUM_THREADS=1.  0 = all cores where our own
    kernels run, for they lose little to what else wants a core, otherwise half of them; shared by
    the ranks of a tensor-parallel group, at least one.
    """
    global _are_ours
    native = kernels.load() if resolve_device(config.device).type == "cpu" else None
    threads = config.threads
    if threads == 0:
        cores = num_cores() if native is not None else num_cores() // 2
        threads = max(1, cores // config.tensor_parallel)
    torch.set_num_threads(threads)
    if native is not None:
        native.num_threads = threads
    _are_ours = True
    return threads


def divide_cores(config: EngineConfig, *, is_native: bool) -> None:
    """Leave torch one thread where our kernels do all that is worth several, for its threads would
    only wait for each other, else half the cores, as without our kernels.

    Changes nothing in a process whose threads `configure_threads` did not set."""
    if not _are_ours:
        return
    if is_native:
        torch.set_num_threads(1)
    elif config.threads == 0:
        torch.set_num_threads(max(1, num_cores() // 2 // config.tensor_parallel))
