"""Measures a target's memory, compared with its weights and the configured KV cache.

    python -m benchmarks.rounds.memory --target work/grown-231m

Runs target and coordinator without Ray and without drafters.  The KV cache has exactly the pages
that --concurrency texts of --context tokens and their --max-tokens need, so every page is
used.  Reports in MiB:

  expected    weight bytes of the checkpoint, plus the KV cache's pages
  libraries   resident size of a process that has imported what a target imports, and nothing else
  resident    the target's, after the run; peak: its maximum, including loading

Bar: `resident` minus `libraries` is at most 1.15 times `expected`.  Exit status 1 if it is missed
or a text was cut short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.support.answers import Law
from benchmarks.support.by_hand import Ours, Setup
from benchmarks.support.options import add_hand_options, parser_of
from benchmarks.support.prompts import Prompt, held_out_text
from benchmarks.support.record import OUT, show_report

_MAX_RATIO = 1.15
_PAGE_SIZE = 16
_MIB = 1 << 20
_ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LIBRARIES = """
import torch, transformers, numpy, grpc
import cluster.engine.engine, cluster.worker.build, cluster.worker.cli, cluster.worker.target
print(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
"""


def kv_bytes(config: Mapping[str, Any], num_tokens: int, item_bytes: int) -> int:
    """Bytes of the keys and values of `num_tokens` tokens.  config: a Llama-like config.json."""
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * config["num_hidden_layers"] * kv_heads * head_dim * item_bytes * num_tokens


def weight_bytes(folder: Path) -> int:
    """Bytes of the checkpoint's weight files; 0 if there are none."""
    return sum(path.stat().st_size for path in folder.glob("model*.safetensors"))


def long_prompts(count: int, length: int, tokenizer: Any) -> list[Prompt]:
    """`count` texts of `length` tokens from different places of the held-out text.

    Raises ValueError if the held-out text is shorter than one of them.
    """
    ids = tokenizer(held_out_text(), add_special_tokens=False)["input_ids"]
    if len(ids) <= length:
        raise ValueError(f"the held-out text has {len(ids)} tokens, fewer than {length}")
    starts = [index * (len(ids) - length) // count for index in range(count)]
    return [Prompt("long", "default", tuple(ids[start : start + length])) for start in starts]


def figures(weights: int, cache: int, libraries: int, resident: int, peak: int) -> dict[str, float]:
    """The reported values, in MiB and ratios; arguments in bytes."""
    expected = weights + cache
    return {
        "weights": round(weights / _MIB, 1),
        "KV cache": round(cache / _MIB, 1),
        "expected": round(expected / _MIB, 1),
        "libraries": round(libraries / _MIB, 1),
        "resident": round(resident / _MIB, 1),
        "peak": round(peak / _MIB, 1),
        "resident less libraries over expected": round((resident - libraries) / expected, 3),
        "resident over expected": round(resident / expected, 3),
    }


def _libraries_bytes() -> int:
    command = [sys.executable, "-c", _LIBRARIES]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout) * 1024


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    folder = Path(arguments.target)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    per_text = -(-(arguments.context + arguments.max_tokens) // _PAGE_SIZE) + 1
    num_pages = arguments.concurrency * per_text
    asked = long_prompts(
        arguments.concurrency, arguments.context, AutoTokenizer.from_pretrained(arguments.target)
    )
    overrides = (
        f"target.engine.model={arguments.target}", f"target.engine.dtype={arguments.dtype}",
        f"target.engine.num_pages={num_pages}", f"target.engine.page_size={_PAGE_SIZE}",
        *arguments.overrides,
    )  # fmt: skip
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as logs:
        ours = Ours(Setup(arguments.config, overrides, (), cores, Path(logs)))
        try:
            ours.start()
            loaded, _ = ours.processes["target"].memory_bytes()
            law = Law.parse("greedy")
            result = ours.run(asked, arguments.max_tokens, law, arguments.concurrency, seed=0)
            resident, peak = ours.processes["target"].memory_bytes()
        finally:
            ours.stop()
    item_bytes = _ITEM_BYTES[arguments.dtype]
    cache = kv_bytes(config, (num_pages + 1) * _PAGE_SIZE, item_bytes)
    return {
        "target": arguments.target,
        "dtype": arguments.dtype,
        "concurrency": arguments.concurrency,
        "context": arguments.context,
        "tokens per answer, least": min(len(answer.token_ids) for answer in result.answers),
        "resident when loaded": round(loaded / _MIB, 1),
        **figures(weight_bytes(folder), cache, _libraries_bytes(), resident, peak),
    }


def problems(report: Mapping[str, Any], max_tokens: int) -> list[str]:
    """Messages for missed bars and shortened texts."""
    found = []
    ratio = report["resident less libraries over expected"]
    if ratio > _MAX_RATIO:
        found.append(f"resident less libraries is {ratio} of the expected, the bar {_MAX_RATIO}")
    if report["tokens per answer, least"] < max_tokens:
        found.append("an answer was cut short")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_of(__doc__)
    add_hand_options(parser)
    add = parser.add_argument
    add("--dtype", choices=sorted(_ITEM_BYTES), default="bfloat16")
    add("--concurrency", type=int, default=32)
    add("--context", type=int, default=2000, help="tokens of each prompt")
    add("--max-tokens", type=int, default=16)
    arguments = parser.parse_args(argv)
    report = measure(arguments)
    show_report(OUT / "rounds/memory.json", report)
    found = problems(report, arguments.max_tokens)
    for line in found:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
