"""Where training runs: one process on a GPU or the CPU, or several that share every step's work.

`accelerate launch -m cluster.train ...` starts one process for each GPU, on several machines too.
`run_together` starts single-threaded ones on the CPU: on cores shared with other work, threads wait
for each other thousands of times per step, and each wait may last a scheduler's time slice;
processes wait once per step.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, PartialState
from accelerate.utils import parse_flag_from_env
from torch.multiprocessing.spawn import spawn

from cluster.engine.device import computes

# Processes wait so long for each other: while one measures, or draws the last answers.
_PATIENCE = timedelta(hours=2)


def processes() -> PartialState:
    """The processes of this run, and this one's index and device."""
    # accelerate reads the same variable.  Other devices than CPUs and GPUs are not served either.
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or not torch.cuda.is_available()
    return PartialState(cpu=on_cpu, timeout=_PATIENCE)


def new_accelerator() -> Accelerator:
    """Mixes bfloat16 in where the device computes it; emulated, it is several times slower."""
    device = processes().device
    if device.type == "cuda":
        # The same seed is to give the same weights; cuBLAS wants to know before its first product.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=True)
    precision = "bf16" if computes(torch.bfloat16, device) else "no"
    # Which parameters a batch reaches depends on it: short answers have no late drafts.
    gradients = DistributedDataParallelKwargs(broadcast_buffers=False, find_unused_parameters=True)
    return Accelerator(mixed_precision=precision, kwargs_handlers=[gradients])


def run_together(num_processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(*arguments)` in so many processes on the CPU; 1 = in this one, as it is."""
    if num_processes == 1:
        work(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/rendezvous"
        spawn(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            _member, (num_processes, meeting_point, work, arguments), nprocs=num_processes
        )


def _member(
    index: int,
    count: int,
    meeting_point: str,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    level = logging.INFO if index == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
    # As `torchrun` would, and that no GPU is used.
    os.environ |= {
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        "RANK": str(index),
        "LOCAL_RANK": str(index),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    state = PartialState(cpu=True, init_method=meeting_point, timeout=_PATIENCE)
    try:
        work(*arguments)
    finally:
        state.destroy_process_group()
