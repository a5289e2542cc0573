"""The kernels of layers, attention and draws against their references, and how fast they are."""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial

import numpy as np
import torch
from torch.nn.functional import silu
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from benchmarks.gpu.part import Measurements, Row, Setting, Skipped
from cluster.core import SamplingParams, TokenArray, TokenTree, token_array
from cluster.engine.attention.backends import create_backend
from cluster.engine.attention.sdpa import SdpaBackend
from cluster.engine.attention.seam import AttentionBackend
from cluster.engine.memory.sequence import Sequence
from cluster.engine.schedule.batch import Batch, Pick, build_batch
from cluster.engine.types import AttentionOptions
from cluster.engine.work import Work
from cluster.records import frozen
from cluster.spec.draw import DrawRows, FusedDraw, begin_draw

PAGE_SIZE = 16


@frozen
class Problem:
    """One layer's attention: each of `batch` sequences has a context, new tokens, of which the
    first is usually the only one, and a tree of `nodes` behind them."""

    batch: int
    context_len: int
    nodes: int
    num_new: int = 1
    window: int | None = None


_PROBLEMS = (
    Problem(1, 1024, 0),
    Problem(1, 1024, 8),
    Problem(1, 1024, 60),
    Problem(8, 1024, 8),
    Problem(32, 1024, 0),
    Problem(128, 1024, 0),
    Problem(64, 1024, 4),
    Problem(1, 1024, 0, num_new=512),
    Problem(4, 3000, 16, window=1024),
    Problem(1, 32768, 16),
)
_TINY_PROBLEMS = (Problem(1, 40, 5), Problem(2, 20, 3, num_new=2, window=8))
# Rows by vocabulary; temperature and top_p.
_DRAWS = ((1, 128_256), (61, 128_256), (256, 128_256))
_TINY_DRAWS = ((3, 500),)
_LAWS = (SamplingParams(0.8), SamplingParams(0.6, top_p=0.9))
# Two float64 logarithms may differ in the last bit.  The noise then differs in the last bit of a
# float once in 2^28, and a draw almost never.


def rows(setting: Setting) -> Measurements:
    """A kernel that differs from its reference is a failure."""
    device = setting.device
    if setting.tiny and not _is_interpreted():
        raise Skipped("Triton's kernels run on a GPU, or in its interpreter, which is not there")
    bandwidth = copy_bandwidth(device, 2**20 if setting.tiny else 2**30)
    for problem in _TINY_PROBLEMS if setting.tiny else _PROBLEMS:
        labels = {"kernel": "attention", **asdict(problem)}
        yield labels, partial(attention_row, problem, setting, bandwidth)
    for num_rows in (3,) if setting.tiny else (1, 32, 512):
        for name in ("add_norm", "rotate", "silu_product"):
            labels = {"kernel": name, "rows": num_rows}
            yield labels, partial(between_row, name, num_rows, setting, bandwidth)
    for num_rows, vocab_size in _TINY_DRAWS if setting.tiny else _DRAWS:
        for law in _LAWS:
            labels = {"kernel": "draw", "rows": num_rows, "vocab": vocab_size, "top_p": law.top_p}
            yield labels, partial(draw_row, num_rows, vocab_size, device, law)


def _is_interpreted() -> bool:
    has_triton = importlib.util.find_spec("triton") is not None
    return has_triton and os.environ.get("TRITON_INTERPRET") == "1"


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


def attention_row(problem: Problem, setting: Setting, bandwidth: float) -> Row:
    """Error and speed of the Triton backend; the reference computes in float32.

    The error is absolute; values are standard normal.
    """
    batch, num_slots = _batch(problem)
    device, sizes, normal = setting.device, setting.sizes, _normals(setting)
    query = normal(sizes.heads, batch.num_rows, sizes.head_dim)
    kv = normal(num_slots, 2, sizes.kv_heads, sizes.head_dim)
    backend, reference, window = create_backend("triton", device), SdpaBackend(), problem.window
    expected = _attend(reference, batch, query.float(), kv.float(), window)()
    call = _attend(backend, batch, query, kv, window)
    error = float((call().float() - expected).abs().max())
    repeats = 1 if setting.tiny else 20
    own_s = seconds(call, device, repeats=repeats)
    reference_s = seconds(_attend(reference, batch, query, kv, window), device, repeats=repeats)
    keys = sum(share.key_len - share.key_start(window) for share in batch.shares)
    read = keys * 2 * sizes.kv_heads * sizes.head_dim * kv.element_size()
    row = _row(error, tolerance(device), own_s, reference_s, read / own_s, bandwidth)
    return {**row, "failed": backend.failure} if backend.failure else row


def between_row(name: str, num_rows: int, setting: Setting, bandwidth: float) -> Row:
    """A kernel between the products of a layer; its reference is what transformers runs."""
    from cluster.engine.fused import kernels

    sizes, device, normal = setting.sizes, setting.device, _normals(setting)
    dim, heads = sizes.head_dim, sizes.heads + 2 * sizes.kv_heads
    norm = LlamaRMSNorm(sizes.hidden).to(device, setting.dtype)
    hidden, change = normal(num_rows, sizes.hidden), normal(num_rows, sizes.hidden)
    gate, up = normal(num_rows, sizes.intermediate), normal(num_rows, sizes.intermediate)
    gate_up = torch.cat((gate, up), 1)
    qkv, kv = normal(num_rows, heads, dim), normal(num_rows, 2, sizes.kv_heads, dim)
    at = torch.arange(num_rows, device=device)
    cosines, sines = rotations = normal(2, num_rows, dim // 2)
    query, key, value = qkv.clone().split((sizes.heads, sizes.kv_heads, sizes.kv_heads), 1)

    def rotated() -> torch.Tensor:
        turns = torch.cat((cosines, cosines), 1), torch.cat((sines, sines), 1)
        turned, turned_key = apply_rotary_pos_emb(query, key, *turns)
        kv.index_copy_(0, at, torch.stack((turned_key, value), 1))
        return turned.transpose(0, 1)

    # How it is called, its reference, and how many numbers it reads and writes.
    own, reference, count = {
        "add_norm": (
            lambda: kernels.add_norm(hidden, change, norm.weight, norm.variance_epsilon),
            lambda: norm(hidden + change),
            4 * hidden.numel(),
        ),
        "rotate": (
            lambda: kernels.rotate(qkv, kv, at, at, rotations, None, 0.0),
            rotated,
            2 * qkv.numel(),
        ),
        "silu_product": (
            lambda: kernels.silu_product(gate_up),
            lambda: silu(gate) * up,
            3 * gate.numel(),
        ),
    }[name]
    with torch.inference_mode():
        expected = reference().float()
        error = float((own().float() - expected).abs().max())
        repeats = 1 if setting.tiny else 20
        own_s, reference_s = (seconds(each, device, repeats=repeats) for each in (own, reference))
    rate = count * hidden.element_size() / own_s
    # Of numbers up to 20, in the last place of their format.
    return _row(error, 4 * tolerance(device), own_s, reference_s, rate, bandwidth)


def draw_row(num_rows: int, vocab_size: int, device: torch.device, law: SamplingParams) -> Row:
    """The draws of rows in one kernel, and with noise in memory."""
    from cluster.engine.draw.triton import create_draw

    generator = torch.Generator(device).manual_seed(1)
    logits = 6.5 * torch.randn((num_rows, vocab_size), generator=generator, device=device)
    seeds = np.random.default_rng(2).integers(0, 2**63, num_rows, dtype=np.uint64)
    laws = [replace(law, seed=seed) for seed in seeds.tolist()]
    keys = DrawRows.of(laws, [np.array([row]) for row in range(num_rows)])

    def call(fused: FusedDraw | None) -> Callable[[], TokenArray]:
        return lambda: begin_draw(logits, keys, fused).taken()

    fused = create_draw(device, vocab_size)
    own, reference = call(fused), call(None)
    differing = int((own() != reference()).sum())
    row: Row = {
        "different_tokens": differing,
        "us": seconds(own, device, repeats=20) * 1e6,
        "reference_us": seconds(reference, device, repeats=5) * 1e6,
    }
    if fused is None:
        row["failed"] = "the kernel cannot run here"
    elif differing:
        row["failed"] = f"{differing} tokens are others than the reference's"
    return row


def _normals(setting: Setting) -> Callable[..., torch.Tensor]:
    """Return what draws tensors of these shapes, always the same ones."""
    generator = torch.Generator(setting.device).manual_seed(1)

    def normal(*shape: int) -> torch.Tensor:
        found = torch.randn(shape, generator=generator, device=setting.device)
        return found.to(setting.dtype)

    return normal


def _row(
    error: float, limit: float, own_s: float, reference_s: float, rate: float, bandwidth: float
) -> Row:
    """rate, bandwidth: bytes per second.  An error beyond the limit is a failure."""
    row: Row = {
        "largest_error": error,
        "us": own_s * 1e6,
        "reference_us": reference_s * 1e6,
        "gb_per_s": rate / 1e9,
        "share_of_copy": rate / bandwidth,
    }
    if not error <= limit:
        row["failed"] = f"it differs from the reference by {error:.1e}"
    return row


def tolerance(device: torch.device) -> float:
    """Largest allowed difference from the reference, for bfloat16 (on a GPU) or float32."""
    return 3e-2 if device.type == "cuda" else 2e-5


def _attend(
    backend: AttentionBackend,
    batch: Batch,
    query: torch.Tensor,
    kv: torch.Tensor,
    window: int | None,
) -> Callable[[], torch.Tensor]:
    plan = backend.plan(batch, len(kv) - PAGE_SIZE)
    options = AttentionOptions(scaling=query.shape[-1] ** -0.5)
    return lambda: plan.attend(query, kv, window, options)


def _batch(problem: Problem) -> tuple[Batch, int]:
    """The batch, with pages in random order, and the number of cache slots it needs."""
    generator = np.random.default_rng(0)
    length = problem.context_len + problem.num_new + problem.nodes
    pages_each = -(-length // PAGE_SIZE)
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
        new = token_array([0] * problem.num_new)
        work = Work(str(index), problem.context_len, new, tree)
        sequence.work = work
        picks.append(Pick(sequence, work, problem.num_new, completes=True))
    num_slots = (pages_each * problem.batch + 1) * PAGE_SIZE
    batch = build_batch(
        picks,
        min_rows=1,
        scratch_slot=num_slots - PAGE_SIZE,
        max_context_len=length + 1,
    )
    return batch, num_slots
