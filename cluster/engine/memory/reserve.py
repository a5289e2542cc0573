"""The memory of a GPU that stays free beside weights and KV cache: for the widest step, and graphs.

At load the model's own forward is run and torch's allocator asked for its peak.  Before that,
`loading/planned.py` estimates a forward by the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from cluster.config.schema import EngineConfig
from cluster.engine.graphs.forward import (
    LOGIT_ROWS,
    WIDTHS,
    is_on_one_gpu,
    may_have_graphs,
)
from cluster.engine.loading.model import LoadedModel
from cluster.engine.paths import StepInputs
from cluster.engine.types import LayerSpec
from cluster.errors import ConfigError
from cluster.records import frozen
from cluster.spec.draw import drawing_bytes

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
