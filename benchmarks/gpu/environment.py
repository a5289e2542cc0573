"""The machine: its versions, its clocks, and how fast its memory is copied."""

from __future__ import annotations

import platform
import shutil

import torch

from benchmarks.gpu.kernels import copy_bandwidth
from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.support.record import asked_of_gpu, commit, versions

_ASKED = (
    "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,clocks.mem,"
    "clocks.max.mem,power.limit,temperature.gpu,mig.mode.current"
)


def rows(setting: Setting) -> Measurements:
    yield {}, _software
    yield {}, _driver
    yield {}, lambda: _device(setting)
    yield {}, lambda: _bandwidth(setting)
    yield {}, _driver  # the clocks behind some work


def _software() -> Row:
    return {
        "python": platform.python_version(),
        **versions(),
        "cuda": torch.version.cuda,
        "compiler": shutil.which("gcc") or shutil.which("clang"),
        "commit": commit(),
    }


def _driver() -> Row:
    if shutil.which("nvidia-smi") is None:
        return {"skipped": "there is no nvidia-smi"}
    return dict(
        zip(_ASKED.split(","), map(str.strip, asked_of_gpu(_ASKED).split(",")), strict=True)
    )


def _device(setting: Setting) -> Row:
    setting.need_gpu()
    found = torch.cuda.get_device_properties(setting.device)
    return {
        "capability": f"{found.major}.{found.minor}",
        "processors": found.multi_processor_count,
        "memory_gb": found.total_memory / 1e9,
        "bf16": torch.cuda.is_bf16_supported(including_emulation=False),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _bandwidth(setting: Setting) -> Row:
    """The most of three sizes, bytes read and written both counted."""
    sizes = (2**24,) if setting.tiny else (2**28, 2**30, 2**32)
    found = {size: copy_bandwidth(setting.device, size) / 1e9 for size in sizes}
    return {"copy_gb_per_s": max(found.values()), "by_mib": {n >> 20: s for n, s in found.items()}}
