"""Devices and number formats: what the configuration's words mean on this machine."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import psutil
import torch

from cluster.cpp import cpu_flags
from cluster.engine.nvidia import MachinePaths, unseen_gpu
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_HUGE_PAGE = 2 * 1024**2


def resolve_device(name: str, machine: MachinePaths | None = None) -> torch.device:
    """`auto` is the first GPU where there is one, else the CPU.

    Raises ConfigError for a device that is not there, and where `auto` would be the CPU although
    `machine` (None = this one) has a GPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
        unseen = unseen_gpu(machine or MachinePaths()) if name == "cpu" else None
        if unseen is not None:
            raise ConfigError(
                f"device auto: {unseen}; or set device: cpu to do without it", param="device"
            )
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device {name!r} is unknown; use auto, cpu, cuda or cuda:N", param="device"
        ) from error
    if device.type == "cuda":
        num_devices = torch.cuda.device_count()
        index = device.index or 0
        if index >= num_devices:
            unseen = None if num_devices else unseen_gpu(machine or MachinePaths())
            raise ConfigError(
                f"device cuda:{index} does not exist: "
                f"{unseen or f'this machine shows {num_devices} GPUs'}; use device: auto or cpu",
                param="device",
            )
        return torch.device("cuda", index)
    if device.type != "cpu":
        raise ConfigError(
            f"device {name!r} is not supported; use auto, cpu, cuda or cuda:N", param="device"
        )
    return device


def resolve_dtype(
    name: str, device: torch.device, stored: torch.dtype | None
) -> torch.dtype | None:
    """The format of weights that are `stored` in one, None = in one that is not known.

    `auto` is their own, but float32 for a coarse format on a CPU that can only emulate it: there a
    verification of 8 rows takes three times as long as in float32, and rounds more.  Weights
    that were bfloat16 stay so in memory where our kernels run (`packed_linear.py`).
    """
    if name != "auto":
        chosen: torch.dtype = getattr(torch, name)
        return chosen
    is_emulated = device.type == "cpu" and stored is not None and not computes(stored)
    return torch.float32 if is_emulated else stored


def convert(module: Any, dtype: torch.dtype | None) -> None:
    """Turn a module's weights, not what is computed of none, into `dtype`; None leaves them.

    Of its buffers small differences count: frequencies of the rotary embedding, whose rounding
    moves far positions, and biases that route tokens to experts."""
    for parameter in module.parameters() if dtype is not None else ():
        parameter.data = parameter.data.to(dtype)


def warn_of_emulation(dtype: torch.dtype) -> None:
    """Warn where torch's libraries are to compute in a format that the CPU does not."""
    if not computes(dtype):
        log.warning(
            "dtype %s is emulated by this processor: steps take about twice as long as with dtype "
            "auto, which keeps the weights as they are and computes in float32",
            str(dtype).removeprefix("torch."),
        )


def warn_of_hidden_gpu(machine: MachinePaths | None = None) -> None:
    """Warn where `auto` is the CPU because the machine's GPU is hidden from this process."""
    machine = machine or MachinePaths()
    if machine.hides_gpus and machine.device.exists():
        log.warning(
            "device auto is the CPU: CUDA_VISIBLE_DEVICES shows this process none of this machine's"
            " NVIDIA GPUs; unset it, or set device: cpu"
        )


def computes(dtype: torch.dtype, device: torch.device = _CPU) -> bool:
    """True if the device has instructions for products of `dtype`."""
    if device.type == "cuda":
        return dtype != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    flags = cpu_flags()
    if dtype == torch.bfloat16:
        return not flags.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})
    if dtype == torch.float16:
        return not flags.isdisjoint({"avx512_fp16", "amx_fp16", "asimdhp"})
    return True


def zeros_in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """`torch.zeros` on the CPU that takes memory only where it is written to: the system's own zero
    pages stand for the rest.

    For what is read in every step: asks for pages of 2 MiB, so that fewer addresses are looked up.
    Where the system gives none they are ordinary ones."""
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _HUGE_PAGE:
        # Before anything is written: pages that are there stay as they are.
        with contextlib.suppress(OSError, AttributeError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)


def return_freed_memory() -> None:
    """Give memory that was freed in small pieces back to the system, where the C library keeps it
    (glibc): after a model is packed that is as much again as the packed weights."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def num_cores() -> int:
    """Cores this process may run on."""
    return len(os.sched_getaffinity(0))


def free_bytes(device: torch.device) -> int:
    """Memory that a device has left for tensors."""
    if device.type == "cpu":
        return free_cpu_bytes()
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def free_cpu_bytes() -> int:
    """Memory the kernel would give out without swapping."""
    return int(psutil.virtual_memory().available)
