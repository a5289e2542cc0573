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

from cluster.engine.reminder import in_a_line

log = logging.getLogger(__name__)

# What Triton raises where it cannot compile, load or launch: no compiler, no Python headers, no
# driver (RuntimeError, AssertionError), too little shared memory, an instruction that is not there.
LAUNCH_ERRORS = (
    TritonError,
    RuntimeError,
    AssertionError,
    ImportError,
    OSError,
    subprocess.SubprocessError,
)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which Triton launches on the tensors' device, not on the current one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


class KernelHealth:
    """The health of some kernels: their first failure is logged, and is their last.

    failure: which that was, "" = none.
    """

    def __init__(self, name: str) -> None:
        """name: what they compute, for the log."""
        self.failure = ""
        self._name = name
        self._is_settled = False

    def settle(self) -> None:
        """From now on a failure is the end: other processes count on these kernels."""
        self._is_settled = True

    def fail(self, error: Exception) -> None:
        """Give them up for this error of a launch; raises it if it is not about the kernels, and
        RuntimeError where they must not be given up."""
        if isinstance(error, torch.OutOfMemoryError):
            raise error
        reason = in_a_line(error)
        if self._is_settled:
            raise RuntimeError(f"{self._name}: the Triton kernels fail: {reason}") from error
        self.failure = f"{self._name}: the Triton kernels cannot run here: {reason}"
        log.warning("%s; the slower reference does", self.failure)
