"""Runs one training in several single-threaded processes that divide the work of every step.

On cores shared with other work, threads wait for each other thousands of times per step, and each
wait may last a scheduler's time slice; processes wait once per step.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import distributed, nn
from torch.multiprocessing.spawn import spawn


def run_together(num_processes: int, work: Callable[..., None], *arguments: Any) -> None:
    """Call `work(*arguments)` in every process; 1 = only this process, with its threads."""
    if num_processes == 1:
        work(*arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        meeting_point = f"file://{folder}/rendezvous"
        spawn(  # type: ignore[no-untyped-call]  # torch leaves it unannotated
            _member, (num_processes, meeting_point, work, arguments), nprocs=num_processes
        )


def rank() -> int:
    """The index of this process; 0 reports and saves."""
    return distributed.get_rank() if distributed.is_initialized() else 0


def process_count() -> int:
    """The number of processes of this run."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def wait_for_all() -> None:
    """Return when every process has come here."""
    if process_count() > 1:
        distributed.barrier()


def sum_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace every gradient by its sum over the processes, bitwise equal in each."""
    if process_count() == 1:
        return
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    distributed.all_reduce(flat)
    start = 0
    for gradient in gradients:
        end = start + gradient.numel()
        gradient.copy_(flat[start:end].view_as(gradient))
        start = end


def of_first_process(value: float) -> float:
    """The first process's value, returned in every process."""
    if process_count() == 1:
        return value
    shared = torch.tensor([value], dtype=torch.float64)
    distributed.broadcast(shared, src=0)
    return float(shared.item())


def _member(
    rank_here: int,
    count: int,
    meeting_point: str,
    work: Callable[..., None],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)
    level = logging.INFO if rank_here == 0 else logging.WARNING
    logging.basicConfig(level=level, format="%(asctime)s %(name)s %(message)s")
    distributed.init_process_group(
        "gloo", init_method=meeting_point, rank=rank_here, world_size=count
    )
    try:
        work(*arguments)
    finally:
        distributed.destroy_process_group()
