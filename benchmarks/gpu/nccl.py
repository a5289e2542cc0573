"""NCCL's all-reduce inside a CUDA graph, in a world of one."""

from __future__ import annotations

from functools import partial

import torch
from torch import distributed

from benchmarks.gpu.kernels import seconds
from benchmarks.gpu.part import Measurements, Row, Setting

_ROWS = (1, 8, 64, 256)
_REDUCTIONS = 64  # two a layer of Llama 3's 8B


def rows(setting: Setting) -> Measurements:
    setting.need_gpu()
    distributed.init_process_group(
        "nccl", init_method=f"file://{setting.folder}/ranks", rank=0, world_size=1
    )
    try:
        for num_rows in _ROWS:
            yield {"rows": num_rows, "reductions": _REDUCTIONS}, partial(_row, setting, num_rows)
    finally:
        distributed.destroy_process_group()


def _row(setting: Setting, num_rows: int) -> Row:
    shape, device = (num_rows, setting.sizes.hidden), setting.device
    states = torch.full(shape, 3.0, dtype=setting.dtype, device=device)

    def reduce() -> None:
        for _ in range(_REDUCTIONS):
            distributed.all_reduce(states)

    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        reduce()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        reduce()
    row: Row = {
        "graph_us": seconds(graph.replay, device, repeats=10) * 1e6,
        "eager_us": seconds(reduce, device, repeats=10) * 1e6,
    }
    if not bool((states == 3.0).all()):
        row["failed"] = "the sum of one rank's numbers is another"
    return row
