"""Kernels and decoding speed on one GPU, without Ray and without a network.

    benchmarks/gpu/run.sh            every shape and batch, under nine minutes
    benchmarks/gpu/run.sh --tiny     the same code on a CPU, in seconds; its figures mean nothing

1. The device's copy bandwidth (read plus written bytes).
2. Attention kernels against the reference: the largest error, which ends the run if it is too
   large, and the keys and values read per second.
3. The fused draw against a draw with the noise in memory, token for token.
4. Grown Llamas of 1B and 8B shape: plain and speculative greedy decoding, and plain without CUDA
   graphs; `benchmarks.gpu.speed` documents what is timed.  The limit per step is weight bytes /
   copy bandwidth.

Writes docs/benchmarks/gpu/DEVICE.{json,md}, or below --out.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks.gpu.grown import load_grown, weight_bytes
from benchmarks.gpu.kernels import Problem, attention_row, copy_bandwidth, draw_row, tolerance
from benchmarks.gpu.report import markdown
from benchmarks.gpu.speed import WARM_UP_ROUNDS, Decoder, speculative_row
from benchmarks.grown.layers import SHAPES, Shape
from benchmarks.support.options import DEMO_DRAFT, DEMO_TARGET, add_options, parser_of
from benchmarks.support.prompts import heldout
from benchmarks.support.record import OUT, rows
from cluster.config.schema import EngineConfig
from cluster.draft.base import DrafterContext
from cluster.draft.lm import LMDrafter
from cluster.draft.options import LMOptions
from cluster.engine.engine import Engine

PROMPT_LEN = 256
TINY = Shape(hidden=384, layers=8, heads=8, kv_heads=2, intermediate=896)
_PAGE_SIZE = 16
_KEPT_NODES = 64
_PROBLEMS = [
    Problem(1, 2048, 0),
    Problem(1, 2048, 16),
    Problem(8, 2048, 8),
    Problem(32, 1024, 8),
    Problem(64, 1024, 4),
    Problem(1, 32768, 16),
]
# Rows by vocabulary.
_DRAWS, _TINY_DRAWS = [(1, 128_256), (17, 128_256), (320, 128_256)], [(3, 500)]
_TINY_PROBLEMS = [Problem(1, 40, 5), Problem(2, 20, 3)]


def measure_kernels(
    problems: Sequence[Problem], device: torch.device, bandwidth: float
) -> list[dict[str, Any]]:
    """One row per problem; raises SystemExit if a kernel differs from the reference."""
    rows = []
    for problem in problems:
        row = attention_row(problem, device, bandwidth)
        _say(f"attention {problem}: {row['us']:.0f} us, error {row['largest_error']:.1e}")
        if not row["largest_error"] <= tolerance(device):
            raise SystemExit(f"error: the attention of {problem} is off: {row}")
        rows.append(row)
    return rows


def measure_draws(sizes: Sequence[tuple[int, int]], device: torch.device) -> list[dict[str, Any]]:
    """One row per (rows, vocabulary); raises SystemExit if the fused draw differs.

    Two float64 logarithms may differ in the last bit.  The noise then differs in the last bit of a
    float once in 2^28, and a draw almost never.
    """
    rows = []
    for num_rows, vocab_size in sizes:
        row = draw_row(num_rows, vocab_size, device)
        _say(f"draw {num_rows} x {vocab_size}: {row['us']:.0f} us")
        if row["different_tokens"]:
            raise SystemExit(f"error: the fused draw is another: {row}")
        rows.append(row)
    return rows


def measure_shape(
    name: str, shape: Shape, arguments: argparse.Namespace, bandwidth: float
) -> dict[str, Any]:
    """Plain and speculative decoding of one grown shape at every batch."""
    device = arguments.device
    dtype = "bfloat16" if device.type == "cuda" else "float32"
    config = _engine_config(DEMO_TARGET, dtype, arguments)
    model = load_grown(shape, config, device)
    num_bytes = weight_bytes(model)
    engine = Engine(config, model)
    engine.capture_ahead()
    eager = Engine(replace(config, cuda_graphs=False), model)
    drafter = _drafter(dtype, arguments)
    # Warm up: a new drafter claims low survivals until its calibration has learned.
    calibrating = heldout_prompts(max(arguments.batches), arguments.prompt_len)
    Decoder(engine, calibrating, drafter, max(arguments.nodes)).run(arguments.tokens)
    rows = []
    for batch in arguments.batches:
        row = measure_batch(engine, eager, drafter, batch, arguments)
        row["limit_tokens_per_s"] = batch * bandwidth / num_bytes
        row["share_of_limit"] = row["plain_tokens_per_s"] / row["limit_tokens_per_s"]
        _say(
            f"{name} batch {batch}: plain {row['plain_tokens_per_s']:.1f} tokens/s, "
            f"{row['share_of_limit']:.1%} of the limit, "
            f"{row['gain_of_graphs']:.2f}x of eager steps"
        )
        rows.append(row)
    engine.close()
    eager.close()
    return {
        "shape": name,
        "grown": True,
        "dtype": dtype,
        "cuda_graphs": engine.uses_graphs,
        "weight_bytes": num_bytes,
        "batches": rows,
    }


def measure_batch(
    engine: Engine, eager: Engine, drafter: LMDrafter, batch: int, arguments: argparse.Namespace
) -> dict[str, Any]:
    """A plain run, one without CUDA graphs, then one for each number of nodes."""
    prompts = heldout_prompts(batch, arguments.prompt_len)
    plain, plain_eager = (
        Decoder(each, prompts, None, 0).run(arguments.tokens) for each in (engine, eager)
    )
    eager_speed = plain_eager.num_tokens / plain_eager.verify_s
    return {
        "batch": batch,
        "plain_tokens_per_s": plain.num_tokens / plain.verify_s,
        "plain_round_ms": 1000 * plain.verify_s / plain.rounds,
        "plain_step_ms": 1000 * statistics.median(plain.step_times_s),
        "eager_tokens_per_s": eager_speed,
        "eager_step_ms": 1000 * statistics.median(plain_eager.step_times_s),
        "gain_of_graphs": plain.num_tokens / plain.verify_s / eager_speed,
        "speculative": [
            speculative_row(
                Decoder(engine, prompts, drafter, nodes).run(arguments.tokens), plain, nodes
            )
            for nodes in arguments.nodes
        ],
    }


def heldout_prompts(count: int, length: int) -> list[list[int]]:
    """Held-out code: `count` prompts of `length` tokens."""
    return heldout("code", count, AutoTokenizer.from_pretrained(DEMO_TARGET), length, length)


def _engine_config(model: Path, dtype: Any, arguments: argparse.Namespace) -> EngineConfig:
    batch, nodes = max(arguments.batches), max(arguments.nodes)
    # The drafter keeps more nodes than it proposes.
    context = arguments.prompt_len + arguments.tokens + nodes + _KEPT_NODES
    return EngineConfig(
        model=str(model),
        dtype=dtype,
        device=str(arguments.device),
        page_size=_PAGE_SIZE,
        num_pages=batch * (-(-context // _PAGE_SIZE) + 1),
        max_running_sequences=batch,
        max_batch_tokens=max(512, batch * (nodes + 1)),
        prefix_cache=False,
    )


def _drafter(dtype: str, arguments: argparse.Namespace) -> LMDrafter:
    options = LMOptions(engine=_engine_config(DEMO_DRAFT, dtype, arguments))
    context = DrafterContext("lm", _KEPT_NODES, max(arguments.batches))
    return LMDrafter(context, options)


def device_name(device: torch.device) -> str:
    """The device's name in the report's file name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return "-".join(name.lower().replace("/", " ").split())


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = parser_of(__doc__)
    add_options(
        parser,
        tiny=(False, "sizes for a CPU"),
    )
    parser.add_argument("--shapes", nargs="+", choices=sorted(SHAPES), default=["1b", "8b"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32, 64])
    parser.add_argument("--nodes", nargs="+", type=int, default=[4, 8, 16])
    add_options(
        parser,
        tokens=(128, "per text"),
        out=OUT / "gpu",
    )
    arguments = parser.parse_args()
    arguments.prompt_len = PROMPT_LEN
    arguments.device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if arguments.tiny:
        arguments.batches, arguments.nodes = [1, 2], [3]
        arguments.tokens, arguments.prompt_len = 24, 24
    elif arguments.device.type == "cpu":
        parser.error("there is no NVIDIA GPU here; --tiny runs the same path on a CPU")
    needed = WARM_UP_ROUNDS * (max(arguments.nodes) + 1) + 2
    if arguments.tokens < needed:
        parser.error(f"--tokens must be at least {needed}: the warm-up takes up to as many")
    return arguments


def shapes_of(arguments: argparse.Namespace) -> Mapping[str, Shape]:
    """The shapes to measure: the grown presets, or (--tiny) one hardly larger than the source."""
    if arguments.tiny:
        return {"tiny": TINY}
    return {name: SHAPES[name] for name in arguments.shapes}


def main() -> None:
    arguments = _arguments()
    begin = time.monotonic()
    device = arguments.device
    bandwidth = copy_bandwidth(device, 2**24 if arguments.tiny else 2**32)
    _say(f"copy bandwidth {bandwidth / 1e9:.0f} GB/s")
    problems = _TINY_PROBLEMS if arguments.tiny else _PROBLEMS
    report = {
        "command": f"benchmarks/gpu/run.sh{' --tiny' if arguments.tiny else ''}",
        "date": time.strftime("%Y-%m-%d"),
        "device": device_name(device),
        "software": {"python": platform.python_version(), "torch": torch.__version__},
        "tiny": arguments.tiny,
        "copy_bytes_per_s": bandwidth,
        "kernels": measure_kernels(problems, device, bandwidth),
        "draws": measure_draws(_TINY_DRAWS if arguments.tiny else _DRAWS, device),
        "models": [
            measure_shape(name, shape, arguments, bandwidth)
            for name, shape in shapes_of(arguments).items()
        ],
    }
    report["seconds"] = time.monotonic() - begin
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / f"{report['device']}.json"
    path.write_text(rows(report) + "\n", "utf-8")
    path.with_suffix(".md").write_text(markdown(report), "utf-8")
    print(path)


if __name__ == "__main__":
    main()
