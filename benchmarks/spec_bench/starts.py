"""Measures the first seconds of a load: a new server each time, with speculation and without it.

    python -m benchmarks.spec_bench.starts QUESTIONS.jsonl
    python -m benchmarks.spec_bench.starts QUESTIONS.jsonl --starts 1 --concurrency 4 --laws greedy

A *start* is a server that has learned nothing and is asked from its first moment on.  Its figure is
the number of tokens that have arrived after --seconds, the first second included.  Start N is asked
the same questions in the same order both ways.  A cell's ratio is that of the two medians.

The same command goes on where it was interrupted; --most ends it after so many starts.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tqdm import tqdm

from benchmarks.spec_bench.client import Asker
from benchmarks.spec_bench.plan import OURS, PLAIN
from benchmarks.spec_bench.questions import Question, load
from benchmarks.support.answers import Law
from benchmarks.support.options import laws, numbers, parser_of
from benchmarks.support.page import head, number, origin, row
from benchmarks.support.processes import exit_on_sigterm
from benchmarks.support.record import OUT, Record
from benchmarks.support.serving import Server, running
from deployments.openai_client import OpenAIServer

_COUNTED = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


@dataclass(frozen=True, slots=True)
class Start:
    """One life of a server.  index: among the starts of its cell."""

    law: Law
    concurrency: int
    index: int
    system: str

    @property
    def key(self) -> str:
        return f"{self.law.name}/{self.concurrency}/{self.system}/{self.index}"


def plan(laws: Sequence[Law], levels: Sequence[int], num_starts: int) -> list[Start]:
    """All starts; those that are compared follow each other, in an order that alternates."""
    return [
        Start(law, level, index, system)
        for index in range(num_starts)
        for law in laws
        for level in levels
        for system in ((OURS, PLAIN) if index % 2 == 0 else (PLAIN, OURS))
    ]


async def ask(
    server: Server, start: Start, questions: Sequence[Question], max_tokens: int, seconds: float
) -> list[int]:
    """Ask for `seconds`; returns the tokens that arrived in each second."""
    shuffled = random.Random(start.index).sample(questions, len(questions))
    extra = {**_COUNTED, **({"speculation": {"enabled": False}} if start.system == PLAIN else {})}
    async with OpenAIServer(server.url) as client:
        asker = Asker(client, server.model(), start.law, max_tokens, extra)
        asking = asyncio.create_task(asker.ask_all(shuffled, start.concurrency, lambda: None))
        began = time.perf_counter()
        done, _ = await asyncio.wait([asking], timeout=seconds)
        if done:
            await asking  # raises what went wrong
            raise RuntimeError(f"all questions were answered in less than {seconds:g} s; ask more")
        asking.cancel()
        await asyncio.wait([asking])
    counts = [0] * round(seconds)
    for at, tokens in asker.arrivals:
        if at - began < len(counts):
            counts[int(at - began)] += tokens
    return counts


def summarise(runs: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """One record per law and level of which both systems have starts."""
    cells: dict[tuple[str, str], dict[str, list[int]]] = {}
    for key, counts in runs.items():
        law, level, system, _ = key.split("/")
        cells.setdefault((law, level), {}).setdefault(system, []).append(sum(counts))
    return [
        {
            "law": law,
            "concurrency": int(level),
            "ours": found[OURS],
            "plain": found[PLAIN],
            "ratio": statistics.median(found[OURS]) / statistics.median(found[PLAIN]),
        }
        for (law, level), found in cells.items()
        if len(found) == 2
    ]


def markdown(document: Mapping[str, Any]) -> str:
    """The report as a table."""
    settings = document["settings"]
    titles = ("law", "at a time", "ours", "ours, plain", "ratio of the medians")
    lines = [
        f"# The first {settings['seconds']:g} seconds", "", origin(document), "",
        "Tokens that arrived, by start.", "", *head(titles),
    ]  # fmt: skip
    for cell in document["summary"]:
        counts = [", ".join(map(str, cell[name])) for name in ("ours", "plain")]
        cells = [cell["law"], str(cell["concurrency"]), *counts, number(cell["ratio"], 3)]
        lines.append(row(cells))
    return "\n".join(lines) + "\n"


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("questions", type=Path, metavar="QUESTIONS.jsonl")
    add("--config", default="configs/local.yaml")
    add("--set", dest="overrides", action="append", default=[], metavar="K=V")
    add("--laws", type=laws, default=laws("greedy,t0.7"))
    add("--concurrency", type=numbers, default=[4, 16])
    add("--starts", type=int, default=5, help="of each system per law and level")
    add("--seconds", type=float, default=10.0)
    add("--max-tokens", type=int, default=128)
    add("--most", type=int, help="end after so many starts; the same command goes on")
    add("--fresh", action="store_true", help="forget what was measured before")
    add("--out", type=Path, default=OUT / "spec_bench" / "starts.json")
    return parser


def main() -> None:
    arguments = _parser().parse_args()
    settings = {
        "file": arguments.questions.name,
        "config": arguments.config,
        "overrides": arguments.overrides,
        "seconds": arguments.seconds,
        "max_tokens": arguments.max_tokens,
    }
    try:
        questions = load(arguments.questions)
        record = Record(arguments.out, settings, fresh=arguments.fresh)
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from error
    starts = plan(arguments.laws, arguments.concurrency, arguments.starts)
    missing = [start for start in starts if start.key not in record.results]
    exit_on_sigterm()
    try:
        for start in tqdm(missing[: arguments.most], unit="start"):
            with running(arguments.config, arguments.overrides) as server:
                counts = asyncio.run(
                    ask(server, start, questions, arguments.max_tokens, arguments.seconds)
                )
            record.add(start.key, counts)
            tqdm.write(f"{start.key}: {sum(counts)} tokens, by second {counts}")
    except (RuntimeError, OSError, httpx.HTTPError, ExceptionGroup) as error:
        raise SystemExit(f"error: {error}") from error
    finally:
        text = markdown(record.publish(summarise(record.results)))
        arguments.out.with_suffix(".md").write_text(text, "utf-8")
    print(text)


if __name__ == "__main__":
    main()
