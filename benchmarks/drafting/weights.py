"""Compares the formats of a target's weights: plain decoding, tokens per second.

    python -m benchmarks.drafting.weights QUESTIONS --config configs/local.yaml

QUESTIONS: Spec-Bench's JSONL.  One target for each format, all in this process; they answer the
same questions in turn, and the order of the turns moves on.  No drafters.  Ends of sequences are
ignored, so that every format draws the same number of tokens.  Ratios are to the first format, with
the least and the greatest of single turns.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from benchmarks.drafting.steps import prepare
from benchmarks.drafting.texts import KINDS, asks
from benchmarks.support.options import numbers, parser_of, sampling, words
from benchmarks.support.record import OUT, show_report
from cluster.config.file import load
from cluster.core import SamplingParams
from cluster.local import LLM


def rate(llm: LLM, prompts: list[list[int]], params: SamplingParams) -> float:
    """Return the tokens per second of all prompts at once, which were read before."""
    llm.generate(prompts, replace(params, max_tokens=1))
    began = time.perf_counter()
    answers = llm.generate(prompts, params, ignore_eos=True)
    return sum(len(each.token_ids) for each in answers) / (time.perf_counter() - began)


def main() -> int:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path)
    add("--config", type=Path, required=True)
    add("--formats", type=words, default=["bf16", "int8", "auto"])
    add("--concurrency", type=numbers, default=[1, 4, 16])
    add("--law", default="greedy")
    add("--turns", type=int, default=6)
    add("--max-tokens", type=int, default=64)
    add("--out", type=Path, default=OUT / "drafting" / "weights.json")
    arguments = parser.parse_args()
    config = replace(load(arguments.config, []).config, drafters={}, tasks={})
    law = sampling(arguments.law, arguments.max_tokens)
    asked = [each for each in asks(arguments.questions, 6) if each.category not in KINDS]
    prompts = [list(each.token_ids) for each in prepare(config, asked, law)]
    rates: dict[str, dict[int, list[float]]] = {}
    with ExitStack() as stack:
        llms = {}
        for name in arguments.formats:
            engine = replace(config.target.engine, weights=name)
            target = replace(config.target, engine=engine)
            llms[name] = stack.enter_context(LLM(replace(config, target=target)))
            rates[name] = {count: [] for count in arguments.concurrency}
        for turn in range(arguments.turns):
            first = turn % len(llms)
            order = [*llms, *llms][first : first + len(llms)]
            for count in arguments.concurrency:
                chosen = [prompts[(turn * count + place) % len(prompts)] for place in range(count)]
                for name in order:
                    rates[name][count].append(rate(llms[name], chosen, law))
    base = rates[arguments.formats[0]]
    report = {}
    for name, by_count in rates.items():
        report[name] = {
            str(count): {
                "tokens/s": statistics.median(values),
                "ratio": [
                    bound([a / b for a, b in zip(values, base[count], strict=True)])
                    for bound in (statistics.median, min, max)
                ],
            }
            for count, values in by_count.items()
        }
    settings = {
        "target": config.target.engine.model, "law": arguments.law, "turns": arguments.turns,
        "max_tokens": arguments.max_tokens,
    }  # fmt: skip
    show_report(arguments.out, {"settings": settings, "formats": report})
    return 0


if __name__ == "__main__":
    sys.exit(main())
