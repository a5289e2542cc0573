"""The device's copy bandwidth, and the attention kernels against their reference."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cluster.core import SamplingParams, TokenArray, TokenTree, token_array
from cluster.engine.attention.backends import create_backend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.memory.sequence import Pending, Sequence
from cluster.engine.schedule.batch import Batch, Pick, build_batch
from cluster.engine.types import AttentionOptions
from cluster.engine.work import Work
from cluster.records import frozen
from cluster.spec.draw import DrawRows, FusedDraw, draw
from cluster.spec.sampling import pack
from cluster.worker.verifier import fused_draw

PAGE_SIZE = 16
_HEADS, _HEAD_DIM = 32, 128  # a layer of Llama 3's 8B
_KV_HEADS = 8


@frozen
class Problem:
    """One layer's attention: each of `batch` sequences has a context and a tree of `nodes`."""

    batch: int
    context_len: int
    nodes: int


def seconds(call: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median time of `call` by the device's own clock if it has one, after two warm-up calls."""
    call(), call()
    times = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            call()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """Bytes per second, read plus written, of a copy within the device."""
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * num_bytes / seconds(lambda: target.copy_(source), device, repeats=20)


def attention_row(problem: Problem, device: torch.device, bandwidth: float) -> dict[str, Any]:
    """Compare error and speed of the backend of `auto` with the reference in float32.

    The error is absolute; values are standard normal.
    """
    batch, num_slots = _batch(problem)
    generator = torch.Generator(device).manual_seed(1)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    query = torch.randn((_HEADS, batch.num_rows, _HEAD_DIM), generator=generator, device=device).to(
        dtype
    )
    kv = torch.randn((num_slots, 2, _KV_HEADS, _HEAD_DIM), generator=generator, device=device).to(
        dtype
    )
    expected = _attend(SdpaBackend(), batch, num_slots, query.float(), kv.float())()
    call = _attend(create_backend("auto"), batch, num_slots, query, kv)
    error = float((call().float() - expected).abs().max())
    own_s = seconds(call, device, repeats=20)
    reference_s = seconds(_attend(SdpaBackend(), batch, num_slots, query, kv), device, repeats=20)
    keys = sum(share.key_len for share in batch.shares)
    read = keys * 2 * _KV_HEADS * _HEAD_DIM * kv.element_size()
    return {
        "batch": problem.batch,
        "context": problem.context_len,
        "nodes": problem.nodes,
        "largest_error": error,
        "us": own_s * 1e6,
        "reference_us": reference_s * 1e6,
        "gb_per_s": read / own_s / 1e9,
        "share_of_copy_bandwidth": read / own_s / bandwidth,
    }


def draw_row(num_rows: int, vocab_size: int, device: torch.device) -> dict[str, Any]:
    """Compare draws of `num_rows` rows at temperature 0.8: fused if the device supports it, and
    with newly computed noise in memory."""
    generator = torch.Generator(device).manual_seed(1)
    logits = 4.0 * torch.randn((num_rows, vocab_size), generator=generator, device=device)
    law = SamplingParams(0.8)
    seeds = np.random.default_rng(2).integers(0, 2**63, num_rows, dtype=np.uint64)
    rows = DrawRows(
        np.array([pack(law)] * num_rows),
        np.zeros(num_rows, dtype=np.bool_),
        seeds,
        np.arange(num_rows),
        np.zeros(num_rows, dtype=np.int64),
    )

    def call(fused: FusedDraw | None) -> Callable[[], TokenArray]:
        return lambda: draw(logits, rows, fused)

    own, reference = call(fused_draw(device, vocab_size)), call(None)
    return {
        "rows": num_rows,
        "vocab": vocab_size,
        "different_tokens": int((own() != reference()).sum()),
        "us": seconds(own, device, repeats=20) * 1e6,
        "reference_us": seconds(reference, device, repeats=5) * 1e6,
    }


def tolerance(device: torch.device) -> float:
    """Largest allowed difference from the reference, for bfloat16 (on a GPU) or float32."""
    return 3e-2 if device.type == "cuda" else 2e-5


def _attend(
    backend: AttentionBackend,
    batch: Batch,
    num_slots: int,
    query: torch.Tensor,
    kv: torch.Tensor,
) -> Callable[[], torch.Tensor]:
    plan = backend.plan(batch, num_slots - PAGE_SIZE)
    options = AttentionOptions(scaling=_HEAD_DIM**-0.5)
    return lambda: plan.attend(query, kv, None, options)


def _batch(problem: Problem) -> tuple[Batch, int]:
    """The batch, with pages in random order, and the number of cache slots it needs."""
    generator = np.random.default_rng(0)
    pages_each = -(-(problem.context_len + 1 + problem.nodes) // PAGE_SIZE)
    pages = iter(generator.permutation(pages_each * problem.batch).tolist())
    tree = TokenTree.of(
        range(problem.nodes),
        [int(generator.integers(-1, node)) if node else -1 for node in range(problem.nodes)],
    )
    picks = []
    for index in range(problem.batch):
        sequence = Sequence(str(index), index, PAGE_SIZE)
        for _ in range(pages_each):
            sequence.tables[0].add(next(pages))
        sequence.append(token_array([0] * problem.context_len))
        work = Work(str(index), problem.context_len, token_array([0]), tree)
        sequence.pending = Pending(work)
        picks.append(Pick(sequence, work, 1, completes=True))
    num_slots = (pages_each * problem.batch + 1) * PAGE_SIZE
    batch = build_batch(
        picks,
        min_rows=1,
        scratch_slot=num_slots - PAGE_SIZE,
        max_context_len=problem.context_len + problem.nodes + 2,
    )
    return batch, num_slots
