"""CUDA's part of graphs: capturing, and words that are sent without stopping the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch

from cluster.engine.attention.seam import Words

Replay = Callable[[], None]
# Records what a function does to memory that stays where it is; the result does the same again.
# The function may be called several times.  May raise anything: then there are no graphs.
Capture = Callable[[Callable[[], None]], Replay]

# torch knows one capture at a time in a process, whichever engine's thread asks for it.
_capturing = Lock()


class CudaCapture:
    """Captures on a stream of its own, all graphs into one pool of memory.

    They may share it in any order: what one leaves there, no other reads, and results lie outside.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._failed: torch.cuda.CUDAGraph | None = None

    def __call__(self, run: Callable[[], None]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        # Where a capture fails at its end, torch leaves its stream current; this brings ours back.
        with _capturing, torch.cuda.device(self._device), torch.cuda.stream(current):
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                run()  # kernels are compiled and libraries set up, which no capture allows
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            try:
                # What other threads do on this device (drafting, drawing) is no part of it.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    run()
            except Exception:
                self._clean_up(graph)
                raise
        return graph.replay

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Where the end of a capture fails too, torch's allocator takes it to be under way for good
        (torch 2.11 to 2.13, CUDAGraph::capture_end): it would free no cached memory any more, and
        ask the graph about every allocation."""
        self._failed = graph
        end: Callable[..., None] | None = getattr(torch._C, "_cuda_endAllocateToPool", None)
        if end is not None:
            with suppress(RuntimeError):  # it was not under way
                end(torch.cuda.current_device(), self._pool)


class Staging:
    """Words on the device, sent in one copy.

    Two areas on the host take turns, so that one can be written while the other is still read.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.words = torch.zeros(num_words, dtype=torch.int32, device=device)
        # Only from pinned memory does a copy join the stream instead of stopping the host.
        self._areas = [
            torch.zeros(num_words, dtype=torch.int32, pin_memory=on_gpu) for _ in range(2)
        ]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        if on_gpu:
            self._sent = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def area(self) -> Words:
        """int32[num_words] of any content, to be written and sent before the next is asked for."""
        self._turn = 1 - self._turn
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # returns at once where nothing was ever sent
        return self._areas[self._turn].numpy()

    def put(self, numbers: npt.NDArray[np.int64]) -> torch.Tensor:
        """Send these in place of what was sent before; returns them as they lie on the device."""
        num_words = 2 * numbers.size
        self.area()[:num_words].view(np.int64)[:] = numbers.ravel()
        self.send(num_words)
        return self.words[:num_words].view(torch.int64).view(numbers.shape)

    def send(self, num_words: int) -> None:
        """Bring the first words of the area to the device."""
        self.words[:num_words].copy_(self._areas[self._turn][:num_words], non_blocking=True)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.record(torch.cuda.current_stream(self.words.device))
