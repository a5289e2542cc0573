"""The KV cache's memory: slots that hold the keys and values of one token in every layer.

A slot is `page * page_size + offset`.  One more page than asked for is allocated; its first slot
is scratch: padding rows write there, and padding keys, always masked, are read from there.  That
page also stands for those a sequence has let go of.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from cluster.config import EngineConfig
from cluster.engine.device import empty_in_huge_pages, free_cpu_bytes
from cluster.engine.memory.reach import Reach
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError

log = logging.getLogger(__name__)

SlotArray = npt.NDArray[np.int64]

# The pool on CPU is never derived larger than this share of free memory: other processes of the
# cluster run on the same machine, and each derives its own.  `num_pages` overrides it.
_MAX_CPU_SHARE = 0.25
# Beyond the peak seen while probing: the allocator's fragmentation and larger steps.
_ACTIVATION_MARGIN = 1.25


class KVCache:
    """Per layer one tensor [slots, 2, kv_heads, head_dim] (keys, then values).

    Layers of equal shape, dtype and device are views of one tensor, so that tokens move in all of
    them by one indexed copy.
    """

    def __init__(self, layers: Sequence[LayerSpec], num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.scratch_page = num_pages
        self.scratch_slot = num_pages * page_size
        self.reach = Reach.of(layers, page_size)
        num_slots = (num_pages + 1) * page_size
        self._stacks: list[torch.Tensor] = []
        self.layers: list[torch.Tensor] = []
        groups: dict[LayerSpec, list[int]] = {}
        for index, layer in enumerate(layers):
            groups.setdefault(layer.storage(), []).append(index)
        by_layer: dict[int, torch.Tensor] = {}
        for spec, members in groups.items():
            shape = (len(members), num_slots, 2, spec.num_kv_heads, spec.head_dim)
            if spec.device.type == "cpu":
                stack = empty_in_huge_pages(shape, spec.dtype)
            else:
                stack = torch.empty(shape, dtype=spec.dtype, device=spec.device)
            # Written once at start: memory is committed now, not in the middle of serving, and
            # a masked key is a finite number (0 * NaN would not be 0).
            stack.zero_()
            self._stacks.append(stack)
            by_layer.update(zip(members, stack.unbind(0), strict=True))
        self.layers = [by_layer[index] for index in range(len(layers))]

    @property
    def num_bytes(self) -> int:
        return sum(stack.numel() * stack.element_size() for stack in self._stacks)

    def move(self, source: SlotArray, destination: SlotArray) -> None:
        """Copy slots to slots in all layers; the two sets may overlap."""
        for stack in self._stacks:
            source_index = torch.from_numpy(source).to(stack.device)
            destination_index = torch.from_numpy(destination).to(stack.device)
            # index_select copies before anything is written, so overlaps are harmless.
            stack.index_copy_(1, destination_index, stack.index_select(1, source_index))


def bytes_per_page(layers: Sequence[LayerSpec], page_size: int) -> int:
    """KV bytes of one page over all layers of this process."""
    return page_size * sum(
        2 * layer.num_kv_heads * layer.head_dim * layer.dtype.itemsize for layer in layers
    )


def derive_num_pages(
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    max_context_len: int,
    activation_bytes: int,
) -> int:
    """How many pages to allocate: as configured, or what fits the device.

    GPU: memory_fraction of the device's memory, less what is allocated (the weights) and a reserve
    for activations.  CPU: what max_running_sequences contexts of max_context_len can use (their
    windows alone where all layers have one), at most memory_fraction of free memory and never more
    than a quarter of it.
    activation_bytes: peak beyond the weights during a full step.
    """
    if config.num_pages:
        return config.num_pages
    page_bytes = bytes_per_page(layers, config.page_size)
    # While a full step runs, with a tree that is as wide.
    num_rows = 2 * config.max_batch_tokens
    reach = Reach.of(layers, config.page_size)
    pages_per_sequence = reach.most_pages(max_context_len, num_rows)
    wanted = config.max_running_sequences * pages_per_sequence
    devices = {layer.device for layer in layers}
    if any(device.type == "cpu" for device in devices):
        share = min(config.memory_fraction, _MAX_CPU_SHARE)
        affordable = int(free_cpu_bytes() * share) // page_bytes
    else:
        affordable = min(
            _affordable_on_gpu(device, config, layers, activation_bytes) for device in devices
        )
    if affordable < 1:
        raise ConfigError(
            f"no memory is left for KV pages of {page_bytes} bytes beside {config.model}; raise "
            f"memory_fraction (now {config.memory_fraction}), quantise, or add tensor parallelism",
            param="memory_fraction",
        )
    num_pages = min(wanted, affordable)
    log.info(
        "kv cache pages=%d page_bytes=%d wanted=%d affordable=%d",
        num_pages, page_bytes, wanted, affordable,
    )  # fmt: skip
    return num_pages


def _affordable_on_gpu(
    device: torch.device, config: EngineConfig, layers: Sequence[LayerSpec], activation_bytes: int
) -> int:
    local = [layer for layer in layers if layer.device == device]
    free, total = torch.cuda.mem_get_info(device)
    # What the caching allocator holds but does not use counts as free for us.
    reusable = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    used = total - free - reusable
    budget = total * config.memory_fraction - used - activation_bytes * _ACTIVATION_MARGIN
    return max(0, int(budget)) // bytes_per_page(local, config.page_size)
