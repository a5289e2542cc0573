"""Devices and number formats: what the configuration's words mean on this machine, and what an
NVIDIA GPU needs beside itself: a torch that sees it, and Triton's tools.

Of that nothing needs a GPU, and everything that is asked of the machine is an argument.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import mmap
import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import psutil
import torch

from cluster.cpp import cpu_flags
from cluster.errors import ConfigError
from cluster.records import frozen

log = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_HUGE_PAGE = 2 * 1024**2
_PATIENCE_S = 20.0
_VERSION = re.compile(r"\d+\.\d+(?:\.\d+)?")
# An empty list of GPUs hides them all.
_VISIBLE = "CUDA_VISIBLE_DEVICES"
# As Triton looks for them.
_COMPILERS = ("gcc", "clang")


def _include() -> Path:
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme for what pip installs; the headers are the system's.
    scheme = "posix_prefix" if scheme == "posix_local" else scheme
    return Path(sysconfig.get_paths(scheme)["include"])


@frozen
class MachinePaths:
    """The places where a machine tells what it has; the defaults are this machine's.

    device, driver: files that NVIDIA's driver makes.  smi: its program, by name or path.  include:
    the folder of Python's headers.  cuda: the version of CUDA that torch was built with, None = it
    was built for CPUs.
    """

    device: Path = Path("/dev/nvidia0")
    driver: Path = Path("/proc/driver/nvidia/version")
    smi: str = "nvidia-smi"
    include: Path = field(default_factory=_include)
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    cuda: str | None = torch.version.cuda

    @property
    def hides_gpus(self) -> bool:
        """True if this process is not to see any, as Ray has it for actors that reserve none."""
        return self.environment.get(_VISIBLE, "0").strip() in ("", "-1", "NoDevFiles")

    def driver_version(self) -> str | None:
        """The version of the driver of the machine's NVIDIA GPU, "unknown" where it says none; None
        without such a GPU."""
        said = self._asked()
        if said is None and not self.device.exists():
            return None
        for text in (said or "", self._driver_file()):
            found = _VERSION.search(text)
            if found is not None:
                return found[0]
        return "unknown"

    def _asked(self) -> str | None:
        """The driver's version by nvidia-smi, None where it knows of no GPU."""
        program = shutil.which(self.smi)
        if program is None:
            return None
        command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(
                command, capture_output=True, text=True, timeout=_PATIENCE_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return said.stdout.strip() or None

    def _driver_file(self) -> str:
        try:
            return self.driver.read_text("utf-8", "replace")
        except OSError:
            return ""

    def compiler(self) -> str | None:
        """The C compiler that Triton would call."""
        wanted, path = self.environment.get("CC"), self.environment.get("PATH")
        names = _COMPILERS if wanted is None else (wanted,)
        return next((each for each in names if shutil.which(each, path=path)), None)


def unseen_gpu(machine: MachinePaths) -> str | None:
    """The words for a GPU that torch does not see, None without one and where it is hidden from
    this process; call where torch sees none."""
    if machine.hides_gpus:
        return None
    version = machine.driver_version()
    if version is None:
        return None
    if machine.cuda is None:
        reason = f"torch {torch.__version__} is built without CUDA; install a build with it"
    else:
        reason = (
            f"torch {torch.__version__} is built for CUDA {machine.cuda}, which needs a newer "
            "driver or one that is loaded; update the driver, or install a build for an older CUDA"
        )
    return f"this machine has an NVIDIA GPU (driver {version}), and torch sees none: {reason}"


def check_can_compile(machine: MachinePaths) -> None:
    """Raise ConfigError where Triton could launch no kernel, for it compiles what launches them."""
    missing, packages = [], []
    if machine.compiler() is None:
        missing.append("a C compiler")
        packages.append("gcc")
    if not (machine.include / "Python.h").is_file():
        missing.append(f"Python's headers ({machine.include / 'Python.h'})")
        packages.append("python3-dev")
    if missing:
        raise ConfigError(
            f"attention on an NVIDIA GPU is compiled by Triton, which lacks {' and '.join(missing)}"
            f" here; install them (on Debian and Ubuntu: apt install {' '.join(packages)}), or set "
            "attention: sdpa, which takes about twice as long",
            param="attention",
        )


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
        return getattr(torch, name)
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
