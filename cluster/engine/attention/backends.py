"""The attention backends by name, the only module that knows all implementations; and that of the
native kernels."""

from __future__ import annotations

import importlib.util
from functools import cached_property

import numpy as np
import torch

from cluster.engine.attention.sdpa import SdpaBackend, SdpaPlan
from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.cpu import kernels
from cluster.engine.cpu.kernels import Kernels, RowPointers
from cluster.engine.schedule.batch import Batch, IndexArray
from cluster.engine.types import AttentionOptions
from cluster.errors import ConfigError

# The attention backend of the native kernels: no copies of keys, and a row's bits are its own.

# What one task of the kernel takes: the keys stay in the cache for so many rows.
_MAX_TASK_ROWS = 16


class NativePlan:
    """One step's rows; other devices and shapes are left to the reference."""

    def __init__(self, kernels: Kernels, batch: Batch, scratch_slot: int) -> None:
        self._kernels = kernels
        self._shares = batch.shares
        self._reference = SdpaPlan(batch, scratch_slot)

    def attend(
        self, query: torch.Tensor, kv: torch.Tensor, window: int | None, options: AttentionOptions
    ) -> torch.Tensor:
        sharing = query.shape[0] // kv.shape[2]
        if not (kv.is_contiguous() and self._kernels.takes(kv, query.shape[2], sharing)):
            return self._reference.attend(query, kv, window, options)
        dtype = query.dtype
        query = query.float()
        if query.stride(2) != 1:
            query = query.contiguous()
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        output = self._kernels.attention(
            query, kv, self.row_pointers, options.scaling, options.softcap, sinks, window
        )
        return output.to(dtype)

    @cached_property
    def row_pointers(self) -> RowPointers:
        """The step's rows, in arrays of int64.

        For each row: the address of its sequence's slots, how many tokens of context it sees, where
        its path begins in the first array, and how many nodes that has.  And where the kernel's
        tasks begin."""
        slots: list[int] = []
        counts: list[int] = []
        contexts: list[IndexArray] = []
        paths: list[IndexArray] = [np.empty(0, np.int64)]
        path_lens: list[IndexArray] = []
        tasks: list[int] = []
        for share in self._shares:
            assert share.slots.flags.c_contiguous, "slots are a view of one array"
            slots.append(share.slots.ctypes.data)
            counts.append(share.num_rows)
            num_nodes = len(share.node_bits)
            contexts.append(share.positions[: share.num_delta] + 1)
            path_lens.append(np.zeros(share.num_delta, np.int64))
            if num_nodes:
                contexts.append(np.full(num_nodes, share.context_len))
                # Ascending in each row: ancestors come before their descendants.
                nodes = share.node_mask.nonzero()[1]
                paths.append(share.slots[share.context_len + nodes])
                path_lens.append(np.array([each.bit_count() for each in share.node_bits]))
            tasks.extend(range(share.row_start, share.row_stop, _MAX_TASK_ROWS))
        lens = np.concatenate(path_lens)
        arrays = (
            np.concatenate(paths),
            np.repeat(np.array(slots, np.int64), counts),
            np.concatenate(contexts),
            np.cumsum(lens) - lens,
            lens,
            np.array([*tasks, self._shares[-1].row_stop], np.int64),
        )
        assert all(array.dtype == np.int64 for array in arrays)
        addresses = tuple(array.ctypes.data for array in arrays)
        return RowPointers(self._shares[-1].row_stop, len(tasks), addresses, (self._shares, arrays))


class NativeBackend(AttentionBackend):
    """Makes NativePlans."""

    name = "native"

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def plan(self, batch: Batch, scratch_slot: int) -> NativePlan:
        return NativePlan(self._kernels, batch, scratch_slot)


NAMES = ("native", "sdpa", "triton")


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of that name; see `chosen`.  Raises ConfigError where the machine cannot run
    it."""
    match chosen(name, device):
        case "sdpa":
            return SdpaBackend()
        case "triton":
            from cluster.engine.attention.triton.backend import TritonBackend

            return TritonBackend()
    loaded = kernels.load()
    if loaded is None:
        raise ConfigError(
            "attention native needs a C++ compiler (on Debian and Ubuntu: apt install g++); "
            "install one, or use auto or sdpa",
            param="attention",
        )
    return NativeBackend(loaded)


def chosen(name: str, device: torch.device) -> str:
    """The name itself; for `auto` that of the best one for `device`.  Raises ConfigError for one
    that is unknown, or whose package is missing."""
    check_name(name)
    has_triton = importlib.util.find_spec("triton") is not None
    if name == "auto":
        # Layers that are not on the GPU are left to the reference by the Triton backend itself.
        if device.type == "cuda":
            return "triton" if has_triton else "sdpa"
        return "sdpa" if kernels.load() is None else "native"
    if name == "triton" and not has_triton:
        raise ConfigError(
            "attention triton needs the triton package; install it, or use auto or sdpa",
            param="attention",
        )
    return name


def check_name(name: str) -> None:
    """Raise ConfigError unless there is a backend of that name."""
    if name != "auto" and name not in NAMES:
        raise ConfigError(
            f"attention {name!r} is unknown; use auto or one of: {', '.join(NAMES)}",
            param="attention",
        )
