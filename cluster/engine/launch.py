"""Launching Triton's kernels: on the tensors' own device, and never at the price of serving.

Whether a kernel can be compiled and launched depends on the host (Triton needs a C compiler) and on
the GPU (its shared memory, its drivers).  Each has a reference that computes the same.
"""

from __future__ import annotations

import logging
import subprocess
from contextlib import AbstractContextManager, nullcontext

import torch
from triton.errors import TritonError

log = logging.getLogger(__name__)

# What Triton raises where it cannot compile, load or launch: no compiler, no Python headers, no
# driver (RuntimeError, AssertionError), too little shared memory, an instruction that is not there.
LAUNCH_ERRORS = (
    TritonError, RuntimeError, AssertionError, ImportError, OSError, subprocess.SubprocessError,
)  # fmt: skip


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class KernelHealth:
    """Whether some kernels work here; their first failure is logged, and is their last."""

    def __init__(self, name: str) -> None:
        """name: what they compute, for the log."""
        self.has_failed = False
        self._name = name

    def fail(self, error: Exception) -> None:
        """Give them up for this error of a launch; raises it if it is not about the kernels."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        self.has_failed = True
        lines = str(error).strip().splitlines()
        log.warning(
            "%s: the Triton kernels cannot run here, the slower reference does: %s: %s",
            self._name, type(error).__name__, lines[0] if lines else "",
        )  # fmt: skip
