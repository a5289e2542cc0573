"""Reproducible mode, bit for bit, over HTTP: the same prompts in every way they can be served.

    python -m benchmarks.reproducible

Serves the target with `target.engine.reproducible: true`, in bfloat16 and in float32, and asks for
the same sampled texts without speculation, with it, and with each drafter alone, alone and among
others.  Equal means equal token ids and equal log-probabilities, all bits of them.  What the mode
costs is the time of the same texts, one at a time, with it and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.equality import acceptance, body_of, complete, token_ids
from benchmarks.serving import (
    ROOT,
    Server,
    add_server_options,
    heldout,
    running,
    write_report,
)

_COST_PROMPTS = 12


def bits_of(answer: dict[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids, and log-probabilities as they were printed: in full, so equal means equal."""
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    return tuple(token_ids(answer)), tuple(json.dumps(each) for each in logprobs)


def bodies(
    arguments: argparse.Namespace, prompts: Sequence[Sequence[int]], speculation: dict[str, Any]
) -> list[dict[str, Any]]:
    return [
        body_of(
            arguments.name, prompt, arguments.max_tokens, seed=1000 + index, temperature=0.8,
            logprobs=1, speculation=speculation,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip


def compare(
    server: Server, arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """How many of the texts are the first way's, for each way."""
    from cluster.config_file import load

    drafters = list(load(ROOT / arguments.config).config.drafters)
    ways: list[tuple[str, dict[str, Any], int]] = [
        ("plain, concurrency 1", {"enabled": False}, 1),
        ("plain, concurrency 16", {"enabled": False}, 16),
        ("all drafters, concurrency 1", {"enabled": True}, 1),
        ("all drafters, concurrency 16", {"enabled": True}, 16),
        *((f"{name}, concurrency 16", {"drafters": [name]}, 16) for name in drafters),
    ]
    found: dict[str, Any] = {}
    first: list[Any] = []
    for name, speculation, concurrency in ways:
        asked = bodies(arguments, prompts, speculation)
        answers = asyncio.run(complete(server, asked, concurrency))
        bits = [bits_of(answer) for answer in answers]
        first = first or bits
        found[name] = {
            "identical": sum(a == b for a, b in zip(bits, first, strict=True)),
            "of": len(bits),
            # None: nothing was verified in this way, and it says nothing about speculation.
            "mean acceptance length": acceptance(answers),
        }
        print(name, found[name], flush=True)
    return found


def seconds(
    server: Server, arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> float:
    """Of plain decoding, one at a time: the median over the prompts, prompts cached before."""
    asked = bodies(arguments, prompts[:_COST_PROMPTS], {"enabled": False})
    times: list[float] = []
    asyncio.run(complete(server, asked, 1))
    for body in asked:
        start = time.perf_counter()
        asyncio.run(complete(server, [body], 1))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--model", default=str(ROOT / "models" / "demo-target"))
    parser.add_argument("--name", default="drafthouse-demo")
    add_server_options(parser)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    half = arguments.prompts // 2
    prompts = heldout("code", half, tokenizer, 5, 200)
    prompts += heldout("prose", arguments.prompts - half, tokenizer, 5, 200)
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens}
    for dtype in arguments.dtypes.split(","):
        overrides = [f"target.engine.dtype={dtype}", *arguments.overrides]
        with running(arguments.config, overrides) as server:
            without = seconds(server, arguments, prompts)
        with running(arguments.config, [*overrides, "target.engine.reproducible=true"]) as server:
            report[dtype] = {
                "seconds per text, with and without the mode": [
                    round(seconds(server, arguments, prompts), 4), round(without, 4),
                ],
                **compare(server, arguments, prompts),
            }  # fmt: skip
    write_report("reproducible", report)


if __name__ == "__main__":
    main()
