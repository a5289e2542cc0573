"""Checks over HTTP that reproducible mode gives bitwise equal results in every serving mode.

    python -m benchmarks.exactness.reproducible [--questions QUESTIONS.jsonl] [--config FILE]

Serves the target with `target.engine.reproducible: true`, in bfloat16 and float32, and requests the
same sampled texts without speculation, with it, and with each drafter alone, each one request at a
time and concurrently.  Token ids and log-probabilities must be equal in all bits.  The mode's cost
is measured as the time of the same texts, one at a time, with and without it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.exactness.prompts import add_prompt_options, config_of, model_folder, prompts_of
from benchmarks.support.completions import acceptance, body_of, complete, token_ids
from benchmarks.support.options import add_server_options, parser_of, words
from benchmarks.support.record import OUT, show_report
from benchmarks.support.serving import Server, running

_MAX_LEN = 200  # of a held-out prompt
_COST_PROMPTS = 12


def bits_of(answer: dict[str, Any]) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Token ids, and log-probabilities as printed, with full precision."""
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    return tuple(token_ids(answer)), tuple(json.dumps(each) for each in logprobs)


def bodies(
    name: str,
    arguments: argparse.Namespace,
    prompts: Sequence[Sequence[int]],
    speculation: dict[str, Any],
) -> list[dict[str, Any]]:
    return [
        body_of(
            name, prompt, arguments.max_tokens, seed=1000 + index, temperature=0.8,
            logprobs=1, speculation=speculation,
        )
        for index, prompt in enumerate(prompts)
    ]  # fmt: skip


def compare(
    server: Server, name: str, arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """For each mode, the number of texts equal to those of the first mode."""
    drafters = list(config_of(arguments).drafters)
    ways: list[tuple[str, dict[str, Any], int]] = [
        ("plain, concurrency 1", {"enabled": False}, 1),
        ("plain, concurrency 16", {"enabled": False}, 16),
        ("all drafters, concurrency 1", {"enabled": True}, 1),
        ("all drafters, concurrency 16", {"enabled": True}, 16),
        *((f"{each}, concurrency 16", {"drafters": [each]}, 16) for each in drafters),
    ]
    found: dict[str, Any] = {}
    first: list[Any] = []
    for way, speculation, concurrency in ways:
        asked = bodies(name, arguments, prompts, speculation)
        answers = asyncio.run(complete(server, asked, concurrency))
        bits = [bits_of(answer) for answer in answers]
        first = first or bits
        found[way] = {
            "identical": sum(a == b for a, b in zip(bits, first, strict=True)),
            "of": len(bits),
            # None: this mode verified no drafts, so it does not test speculation.
            "mean acceptance length": acceptance(answers),
        }
        print(way, found[way], file=sys.stderr, flush=True)
    return found


def seconds(
    server: Server, name: str, arguments: argparse.Namespace, prompts: Sequence[Sequence[int]]
) -> float:
    """Median seconds of plain decoding per prompt, one at a time, with cached prompts."""
    asked = bodies(name, arguments, prompts[:_COST_PROMPTS], {"enabled": False})
    times: list[float] = []
    asyncio.run(complete(server, asked, 1))
    for body in asked:
        start = time.perf_counter()
        asyncio.run(complete(server, [body], 1))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    from transformers import AutoTokenizer

    parser = parser_of(__doc__)
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--dtypes", type=words, default=["bfloat16", "float32"])
    add_prompt_options(parser, 300)
    add_server_options(parser)
    arguments = parser.parse_args()
    prompts = prompts_of(
        arguments, AutoTokenizer.from_pretrained(model_folder(arguments)), _MAX_LEN
    )
    report: dict[str, Any] = {"prompts": len(prompts), "max_tokens": arguments.max_tokens}
    for dtype in arguments.dtypes:
        overrides = [f"target.engine.dtype={dtype}", *arguments.overrides]
        with running(arguments.config, overrides) as server:
            without = seconds(server, server.model(), arguments, prompts)
        with running(arguments.config, [*overrides, "target.engine.reproducible=true"]) as server:
            name = server.model()
            report[dtype] = {
                "seconds per text, with and without the mode": [
                    round(seconds(server, name, arguments, prompts), 4), round(without, 4),
                ],
                **compare(server, name, arguments, prompts),
            }  # fmt: skip
    show_report(OUT / "exactness" / "reproducible.json", report)


if __name__ == "__main__":
    main()
