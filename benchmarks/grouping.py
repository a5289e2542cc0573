"""Compares batches of one task with mixed batches: does waiting for similar requests pay?

    python -m benchmarks.grouping --target work/grown-231m

Two systems without Ray use the drafters that the configuration gives each task.  One forms batches
with the same task and sampling parameters if it can (`coordinator.max_homogeneity_wait_ms` as
configured); the other takes all ready requests (0).  They run in turn, each while the other is
stopped (SIGSTOP), with the same prompts of all kinds; every other run is greedy, the rest at T =
0.8.  Reports the medians of both and of the ratio of each pair.  Exit status 1 if grouped is below
0.98 of mixed.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.answers import figures
from benchmarks.by_hand import Ours, Setup, add_hand_options
from benchmarks.prompts import KINDS, prompts
from benchmarks.serving import write_report
from cluster.config_file import load

_MIN_RATIO = 0.98
_MIXED = "coordinator.max_homogeneity_wait_ms=0"


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, float]:
    """pairs: tokens per second, grouped and mixed, of consecutive runs."""
    grouped, mixed = zip(*pairs, strict=True)
    return {
        "grouped, tokens/s": round(statistics.median(grouped), 1),
        "mixed, tokens/s": round(statistics.median(mixed), 1),
        "grouped over mixed": round(statistics.median(g / m for g, m in pairs), 3),
        "least": round(min(g / m for g, m in pairs), 3),
        "greatest": round(max(g / m for g, m in pairs), 3),
        "pairs": len(pairs),
    }


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoTokenizer

    overrides = (f"target.engine.model={arguments.target}", *arguments.overrides)
    config = load(arguments.config, overrides).config
    cores = tuple(sorted(os.sched_getaffinity(0)))
    pool = iter(
        prompts(
            arguments.prompts * arguments.pairs * len(arguments.laws),
            AutoTokenizer.from_pretrained(arguments.target), list(KINDS),
        )
    )  # fmt: skip
    pairs: dict[str, list[tuple[float, float]]] = {law.name: [] for law in arguments.laws}
    with tempfile.TemporaryDirectory() as logs:
        systems = {
            name: Ours(Setup(
                arguments.config, (*overrides, *more), tuple(config.drafters), cores,
                Path(logs) / name, by_task=True,
            ))
            for name, more in (("grouped", ()), ("mixed", (_MIXED,)))
        }  # fmt: skip
        try:
            for system in systems.values():
                system.start()
                _each(system, "pause")
            for number in range(arguments.pairs):
                for law in arguments.laws:
                    asked = [next(pool) for _ in range(arguments.prompts)]
                    rates: dict[str, float] = {}
                    for name in sorted(systems, reverse=bool(number % 2)):
                        _each(systems[name], "resume")
                        systems[name].run(asked, 2, law, arguments.concurrency, number)
                        result = systems[name].run(
                            asked, arguments.max_tokens, law, arguments.concurrency, number
                        )
                        _each(systems[name], "pause")
                        rates[name] = figures(result, arguments.concurrency)["tokens_per_s"]
                    pairs[law.name].append((rates["grouped"], rates["mixed"]))
                    print(law.name, rates, file=sys.stderr, flush=True)
        finally:
            for system in systems.values():
                _each(system, "resume")
                system.stop()
    return {
        "target": arguments.target,
        "concurrency": arguments.concurrency,
        "max homogeneity wait, ms": config.coordinator.max_homogeneity_wait_ms,
        **{law: summary(found) for law, found in pairs.items()},
    }


def _each(system: Ours, method: str) -> None:
    for process in system.processes.values():
        getattr(process, method)()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_hand_options(parser)
    add = parser.add_argument
    add("--concurrency", type=int, default=16)
    add("--prompts", type=int, default=20, help="per run")
    add("--pairs", type=int, default=5)
    add("--max-tokens", type=int, default=64)
    arguments = parser.parse_args(argv)
    report = measure(arguments)
    write_report("grouping", report)
    missed = [law.name for law in arguments.laws
              if report[law.name]["grouped over mixed"] < _MIN_RATIO]  # fmt: skip
    for name in missed:
        print(f"missed: {name}: grouped is below {_MIN_RATIO} of mixed", file=sys.stderr)
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
