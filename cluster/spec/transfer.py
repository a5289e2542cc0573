"""Arrays on their way between the host and a device, without a stop of the host for each."""

from __future__ import annotations

from typing import Any

import numpy.typing as npt
import torch


def sent(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """The array as a tensor on `device`; on a CPU in the array's own memory.

    Of a GPU only later work on the present stream may use it."""
    tensor = torch.from_numpy(array)
    if device.type == "cuda":
        # Only from pinned memory does a copy join the stream instead of stopping the host.
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


class Transfer:
    """A tensor's numbers on their way to the host."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._copy = tensor.to("cpu", non_blocking=True)  # pinned, of a GPU's
        self._done: torch.cuda.Event | None = None
        if tensor.is_cuda:
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._done.record(torch.cuda.current_stream(tensor.device))

    def received(self) -> npt.NDArray[Any]:
        """The numbers, once the device has done all that it was asked before the transfer."""
        if self._done is not None:
            self._done.synchronize()
        return self._copy.numpy()


def received(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """The tensor's numbers on the host, once the device has done all that it was asked before."""
    return Transfer(tensor).received()
