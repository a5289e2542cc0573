"""How many pages the cache has, how they are divided between groups of layers, and what stays free.

A number of pages is a measure of memory: of so many pages in every layer.  Where layers with full
attention stand beside layers with a window, a text of some length needs more pages of the first
than of the second, so the memory is divided as the texts that it is configured for would fill it:
one of max_context_len, and the other running ones of one length, the greatest for which they fit
beside it.  With these texts both kinds run out together, and the longest one that is allowed is
never refused for want of a window's pages.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.device import free_bytes
from cluster.engine.graphs.forward import (
    LOGIT_ROWS,
    WIDTHS,
    is_on_one_gpu,
    may_have_graphs,
)
from cluster.engine.loading.model import LoadedModel
from cluster.engine.memory.kv_cache import LayerGroup, layer_groups
from cluster.engine.paths import StepInputs
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.spec.draw import drawing_bytes

# The pools on CPU are never derived larger than this share of free memory: other processes of the
# cluster run on the same machine, and each derives its own.  `num_pages` overrides it.
_MAX_CPU_SHARE = 0.25
# Where no share is configured: what a laptop has to spare on a CPU, and most of a GPU.
_CPU_BYTES = 2 * 1024**3
_GPU_SHARE = 0.9
# Matrices of all tokens before, for each running text: those that it has, those that it is about to
# write, and one that prefix hits continue from.  One more place is of no text.
_STATES_PER_TEXT, _LEAST_STATES = 3, 3


def derive_num_pages(
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    max_context_len: int,
    reserved_bytes: int,
) -> tuple[int, ...]:
    """The pages to allocate for each group of layers: as configured, or what fits the device.

    GPU: memory_fraction of the device's memory, less what is in use (the weights) and
    reserved_bytes.  CPU: see `_free_bytes`.  Never more than max_running_sequences contexts of
    max_context_len can use.
    """
    reserved_bytes += derive_num_states(config, layers, reserved_bytes) * state_bytes(layers)
    groups = layer_groups(layers, config.page_size)
    division = _Division(config, groups, max_context_len)
    if config.num_pages:
        return division.of(config.num_pages)
    wanted = division.cost(division.pages(max_context_len, max_context_len))
    affordable = min(
        (_free_bytes(device, config) - reserved_bytes)
        // sum(group.bytes_per_page(device) for group in groups)
        for device in {layer.device for layer in layers}
    )
    if affordable < 1:
        raise ConfigError(
            f"no memory is left for KV pages beside {config.model}; raise memory_fraction (now "
            f"{gpu_share(config)}), "
            "quantise, or add tensor parallelism",
            param="memory_fraction",
        )
    return division.of(min(wanted, affordable))


def derive_num_states(
    config: EngineConfig, layers: Sequence[LayerSpec], reserved_bytes: int
) -> int:
    """The places for layers' matrices of all tokens before: those that are wanted or, where memory
    is short, as many as fit half of it; the rest is for pages."""
    num_bytes, wanted = state_bytes(layers), wanted_states(config, layers)
    if not wanted or config.num_pages:
        return wanted
    free = min(_free_bytes(layer.device, config) for layer in layers)
    return max(_LEAST_STATES, min(wanted, (free - reserved_bytes) // 2 // num_bytes))


def wanted_states(config: EngineConfig, layers: Sequence[LayerSpec]) -> int:
    """See `_STATES_PER_TEXT`; 0 where no layer has one."""
    return (1 + _STATES_PER_TEXT * config.max_running_sequences) * bool(state_bytes(layers))


def state_bytes(layers: Sequence[LayerSpec]) -> int:
    """The bytes of one place, of all layers."""
    return sum(layer.state_bytes for layer in layers)


def gpu_share(config: EngineConfig) -> float:
    """The share of a GPU's memory that may be in use with the KV cache."""
    return _GPU_SHARE if config.memory_fraction is None else config.memory_fraction


def _free_bytes(device: torch.device, config: EngineConfig) -> int:
    """What may be taken of the device's memory beside what is in use: on a CPU the configured
    share of what is free, else 2 GiB, at most a quarter of it."""
    free = free_bytes(device)
    if device.type != "cpu":
        total = torch.cuda.mem_get_info(device)[1]
        return int(total * gpu_share(config)) + free - total
    if config.memory_fraction is None:
        return min(_CPU_BYTES, int(free * _MAX_CPU_SHARE))
    return int(free * min(config.memory_fraction, _MAX_CPU_SHARE))


class _Division:
    """Divides memory between groups of layers, as the module says."""

    def __init__(
        self, config: EngineConfig, groups: Sequence[LayerGroup], max_context_len: int
    ) -> None:
        self._groups = groups
        self._max_context_len = max_context_len
        self._num_others = config.max_running_sequences - 1
        # While a full step runs, with trees that are as wide: of one text, or spread over all.
        self._num_rows = 2 * config.max_batch_tokens
        devices = {layer.device for group in groups for layer in group.layers}
        self._page_bytes = [[each.bytes_per_page(device) for each in groups] for device in devices]

    def pages(self, longest: int, others: int) -> list[int]:
        """The pages of each group: those of one text of `longest` tokens and of the others."""
        num_rows = self._num_rows // (self._num_others + 1)
        return [
            group.reach.most_pages(longest, self._num_rows)
            + self._num_others * group.reach.most_pages(others, num_rows)
            for group in self._groups
        ]

    def cost(self, pages: Sequence[int]) -> int:
        """Of how many pages in every layer the memory is needed, on the device that is the first
        to be full."""
        return max(-(-_weigh(pages, weights) // sum(weights)) for weights in self._page_bytes)

    def of(self, num_pages: int) -> tuple[int, ...]:
        """The pages of each group that take the memory of `num_pages` in every layer."""
        if len(self._groups) == 1:
            return (num_pages,)
        full, windowed = self._whole_texts(num_pages)
        left = min(
            (num_pages * sum(weights) - _weigh((full, windowed), weights)) // weights[0]
            for weights in self._page_bytes
            if weights[0]
        )
        return full + left, windowed

    def _whole_texts(self, num_pages: int) -> list[int]:
        """The pages of the texts that fit, as the module says; of the longest one as much as does
        where it does not, and in proportion to them all where these leave some."""
        longest = self._max_context_len

        def pages(length: int) -> list[int]:
            """First the longest text grows, then the others do."""
            return self.pages(min(length, longest), max(length - longest, 0))

        lengths = range(2 * longest + 1)
        # A text of no tokens costs nothing.
        num_fitting = bisect_right(lengths, num_pages, key=lambda length: self.cost(pages(length)))
        found = pages(num_fitting - 1)
        if num_fitting < len(lengths):
            return found
        cost = self.cost(found)
        return [each * num_pages // cost for each in found]


def _weigh(pages: Sequence[int], weights: Sequence[int]) -> int:
    return sum(count * weight for count, weight in zip(pages, weights, strict=True))


# The memory of a GPU that stays free beside weights and KV cache: for the widest step, and graphs.
#
# At load the model's own forward is run and torch's allocator asked for its peak. Before that,
# `loading/planned.py` estimates a forward by the configuration.


# Logits that a step asks for at most, per sequence.
_ROWS_PER_SEQUENCE = 16
# Tensors end before their blocks do, and cuBLAS keeps 32 MiB for each stream that it is called on.
# What no tensor has (CUDA's context, NCCL's buffers, loaded kernels) is in use when the KV cache is
# sized, or has room in the share of the device that is left to others.
_MARGIN = 1.05

# Of the delta rule: a text's matrix, with those that the next is made of, and float32 keys of its
# rows and of the page before them, with what is made of these.
_NUM_COPIES, _NUM_LINES = 4, 5

# The bytes of a forward at its peak, by its rows and by those that have logits.
ForwardBytes = Callable[[int, int], int]


@frozen
class Reserve:
    """Bytes.  steps: for the widest step, with the draws at its end.  graphs: for CUDA graphs."""

    steps: int = 0
    graphs: int = 0

    @property
    def total(self) -> int:
        return self.steps + self.graphs


def num_logit_rows(config: EngineConfig, of_drafter: int | None = None) -> int:
    """The most rows of a step that are drawn from.  of_drafter: as it says, None = a target's."""
    of_target = config.max_running_sequences * _ROWS_PER_SEQUENCE
    return min(config.max_batch_tokens, of_target if of_drafter is None else of_drafter)


def reserve(
    config: EngineConfig,
    layers: Sequence[LayerSpec],
    vocab_size: int,
    logit_rows: int,
    forward_bytes: ForwardBytes,
    *,
    on_one_gpu: bool,
) -> Reserve:
    """layers: what the model caches.  logit_rows: of a step at most.  forward_bytes: but for what
    the delta rule takes.  on_one_gpu: where steps run in graphs too, if they can."""
    num_rows, graphs = config.max_batch_tokens, 0
    # A forward is over when its rows are drawn from.
    forward = forward_bytes(num_rows, logit_rows) + _gathered_bytes(config, layers)
    steps = max(forward, drawing_bytes(logit_rows, vocab_size))
    if on_one_gpu and may_have_graphs(config, layers):
        # All share a pool, in which the widest comes first: the others find room in what it has
        # left.  Their logits lie outside.
        width = min(num_rows, WIDTHS[-1])
        num_logits = min(width, LOGIT_ROWS)
        logits = num_logits * vocab_size * torch.float32.itemsize
        graphs = forward_bytes(width, num_logits) + logits
    return Reserve(int(steps * _MARGIN), int(graphs * _MARGIN))


def _gathered_bytes(config: EngineConfig, layers: Sequence[LayerSpec]) -> int:
    """An estimate of what the delta rule takes in a layer of the widest step; 0 without one."""
    num_rows = config.max_batch_tokens
    num_texts = min(config.max_running_sequences, num_rows)
    num_lines = _NUM_LINES * (num_texts * config.page_size + num_rows)
    sizes = (
        _NUM_COPIES * num_texts * each.state_bytes + num_lines * each.state_bytes // each.state[-1]
        for each in layers
        if each.state
    )
    return max(sizes, default=0)


def measured(config: EngineConfig, model: LoadedModel, logit_rows: int) -> Reserve:
    """What a loaded model needs; nothing on a CPU.

    logit_rows: of a step at most.  All ranks must call, for a forward may hold collectives.  Raises
    ConfigError where not even a forward has room."""
    if model.device.type != "cuda":
        return Reserve()

    def forward_bytes(num_rows: int, num_logits: int) -> int:
        torch.cuda.reset_peak_memory_stats(model.device)
        before = torch.cuda.memory_allocated(model.device)
        run(model, num_rows, num_logits)
        return torch.cuda.max_memory_allocated(model.device) - before

    try:
        return reserve(
            config,
            model.layers,
            model.num_columns,
            logit_rows,
            forward_bytes,
            on_one_gpu=is_on_one_gpu(model),
        )
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"a step of {config.max_batch_tokens} rows has no room beside the weights of "
            f"{config.model}; lower max_batch_tokens, quantise, or add tensor parallelism",
            param="max_batch_tokens",
        ) from error


def run(model: LoadedModel, num_rows: int, num_logits: int) -> None:
    """Run the model's forward on rows of no text, without a KV cache: what stands for attention
    takes as much memory for its results."""
    rows = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
    with torch.inference_mode():
        plan: Any = SimpleNamespace(
            attend_layer=lambda layer, query, *_: query.transpose(1, 2).contiguous(),
            convolve_layer=lambda layer, states, _: states.clone(),
            delta_layer=lambda layer, query, key, value, *_: value.clone(),
        )
        model.plain(StepInputs(rows, rows, rows[:num_logits], plan))
