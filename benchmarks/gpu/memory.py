"""Memory that is reserved for steps, against what they took."""

from __future__ import annotations

import gc
from functools import partial

import torch

from benchmarks.gpu.part import Measurements, Row, Setting
from benchmarks.gpu.target import Target
from cluster.core import SamplingParams

_ROWS, _TINY_ROWS = (2048, 512), (64,)
_BATCH, _TINY_BATCH = 64, 2
_GB = 1e9


def rows(setting: Setting) -> Measurements:
    for num_rows in _TINY_ROWS if setting.tiny else _ROWS:
        yield {"max_batch_tokens": num_rows}, partial(_row, setting, num_rows)


def _row(setting: Setting, num_rows: int) -> Row:
    """Full steps of prompts, then draws of a whole batch at a temperature."""
    gc.collect()  # the last engine's pages
    torch.cuda.empty_cache()
    batch = _TINY_BATCH if setting.tiny else _BATCH
    target = Target(setting, max_batch_tokens=num_rows, max_running_sequences=batch)
    reserve = target.engine.reserve
    row = {
        "weights_gb": sum(each.nbytes for each in target.model.module.parameters()) / _GB,
        "kv_gb": sum(layer.nbytes for layer in target.engine.cache.layers) / _GB,
        "reserved_gb": reserve.total / _GB,
        "reserved_for_graphs_gb": reserve.graphs / _GB,
    }
    if setting.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    params = SamplingParams(0.8, top_p=0.9, seed=1, max_tokens=4096)
    target.run(batch, min(num_rows, setting.sizes.max_context_len // 2), 2, params=params)
    if setting.device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        lasting = row["weights_gb"] + row["kv_gb"]
        row["taken_gb"] = torch.cuda.max_memory_allocated() / _GB - lasting
        # Graphs' memory is in torch's pools, and none of its tensors.
        row["taken_with_pools_gb"] = torch.cuda.max_memory_reserved() / _GB - lasting
        row["reserved_of_taken"] = row["reserved_gb"] / row["taken_with_pools_gb"]
        row["free_gb"], row["total_gb"] = free / _GB, total / _GB
    return row
