"""`drafthouse bench URL`: the prompts, the runs that its options ask for, and what they found."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, field
from itertools import chain, cycle, islice, product
from pathlib import Path
from typing import Any

import httpx

from cluster.errors import ConfigError, WorkerError
from cluster.logs import say
from cluster.options import number, url
from cluster.records import frozen
from cluster.spec.interval import Interval
from deployments.bench.load import (
    GOODPUT,
    Level,
    Side,
    TimedAnswer,
    equal_texts,
    figures,
    load,
    ratios,
)
from deployments.evaluate.prompts import EvaluatedPrompt, read_prompts
from deployments.metrics_reader import Page, SpeculationCounts, speculation
from deployments.openai_client import OpenAIServer
from deployments.report import rendered

# What a bench found: Markdown for people, JSON by the names of vLLM's bench, a picture.


@frozen
class Run:
    """All rounds of one side at one load."""

    level: Level
    side: str
    answers: Sequence[TimedAnswer]
    figures: Mapping[str, float]
    speculation: SpeculationCounts | None

    @property
    def names(self) -> list[str]:
        return [str(self.level), *([self.side] if self.side else [])]


@frozen
class Compared:
    """The two sides of a load.  ratios: of their figures.  equal_texts: how many, of how many."""

    first: Run
    second: Run
    ratios: Mapping[str, Interval]
    equal_texts: tuple[int, int]


@frozen
class Report:
    """All that was asked, and all runs; fields: of every request of the first side."""

    url: str
    fields: Mapping[str, Any]
    num_prompts: int
    rounds: int
    goodput: Mapping[str, float]
    runs: list[Run] = field(default_factory=list)

    def compared(self) -> Iterator[Compared]:
        """Yield what each load says of its two sides, where two are compared."""
        if self.runs[0].side:
            for first, second in zip(self.runs[::2], self.runs[1::2], strict=True):
                answers = first.answers, second.answers
                yield Compared(first, second, ratios(*answers), equal_texts(*answers))


def markdown(report: Report) -> str:
    """The tables that the command prints."""
    return rendered("bench", {"report": report, "compared": [*report.compared()]})


def write_json(report: Report, path: Path) -> None:
    """Write every figure; those of a run have the names of `vllm bench serve`."""
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "url": report.url,
        "request": dict(report.fields),
        "num_prompts": report.num_prompts,
        "rounds": report.rounds,
        "goodput": dict(report.goodput),
        "runs": [
            {
                "load": asdict(run.level),
                "side": run.side,
                **run.figures,
                "speculation": run.speculation and asdict(run.speculation),
            }
            for run in report.runs
        ],
        "ratios": [
            {
                "load": str(each.first.level),
                "of": each.first.side,
                "to": each.second.side,
                **{
                    name: {"value": ratio.mean, "low": ratio.low, "high": ratio.high}
                    for name, ratio in each.ratios.items()
                },
                "equal_texts": each.equal_texts[0],
            }
            for each in report.compared()
        ],
    }
    path.write_text(json.dumps(document, indent=2) + "\n", "utf-8")


def write_picture(report: Report, path: Path) -> None:
    """Draw throughput and latencies by load; raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(
            "--png needs matplotlib: pip install 'drafthouse[bench]'; the figures are above"
        ) from error
    figure = Figure(figsize=(12, 4), layout="constrained")
    shown = {
        "output tokens/s": "output_throughput",
        "TTFT, median, ms": "median_ttft_ms",
        "TPOT, median, ms": "median_tpot_ms",
    }
    sides = list(dict.fromkeys(run.side for run in report.runs))
    for axes, (title, name) in zip(figure.subplots(1, len(shown)), shown.items(), strict=True):
        for place, side in enumerate(sides):
            runs = [run for run in report.runs if run.side == side]
            values = [run.figures.get(name, 0.0) for run in runs]
            width = 0.8 / len(sides)
            at = [index + place * width for index in range(len(runs))]
            axes.bar(at, values, width, label=side or None)
        axes.set_xticks(range(len(runs)), [str(run.level) for run in runs])
        axes.set_title(title)
    if len(sides) > 1:
        axes.legend()
    figure.savefig(path)


# Everyday questions, asked where nobody names one; long enough answers, of several kinds.
QUESTIONS = (
    "How do vaccines work? Explain it to a ten-year-old.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "What should I pack for a week of hiking in the mountains?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show the steps.",
    "Compare tea and coffee: where they come from, how they are made, what they do to you.",
    "Write a friendly e-mail that moves a meeting from Tuesday to Thursday.",
    "List the planets of the solar system as a JSON array with name and number of moons.",
    "Rewrite in plain English: the aforementioned party shall forthwith remit the outstanding sum.",
    "Why is the sky blue, and why is it red in the evening?",
    "Translate into French: We would like a table for four by the window, please.",
    "Explain the difference between a process and a thread, with an example of each.",
    "Write an SQL query that finds the three customers who spent most last year.",
    "Give me a recipe for vegetable soup, with amounts for four people.",
    "What are the arguments for and against a four-day working week?",
    "Write a short story about a lighthouse keeper who finds a message in a bottle.",
)
_OFF = "off"
# With fewer, an interval over them alone would be very wide.
_FEW_BLOCKS = 4


def run(arguments: argparse.Namespace) -> int:
    """Bench as the options say; 1 if a request failed."""
    report = asyncio.run(bench(arguments))
    if arguments.json:  # first: nobody may read the rest
        write_json(report, arguments.json)
    sys.stdout.write(markdown(report))
    if arguments.png:
        write_picture(report, arguments.png)
    return int(any(each.figures["failed"] for each in report.runs))


async def bench(
    arguments: argparse.Namespace, transport: httpx.AsyncBaseTransport | None = None
) -> Report:
    """Run every load on every side, the sides in turn; transport: None = the network."""
    is_chat = arguments.endpoint == "chat"
    asked = prompts(arguments.prompts, arguments.num_prompts, is_chat=is_chat)
    async with AsyncExitStack() as stack:
        sides = []
        for name, base, fields in _asked(arguments):
            server = await stack.enter_async_context(
                OpenAIServer(
                    base, arguments.api_key, transport, keeps_connections=not arguments.no_keepalive
                )
            )
            model, is_ours = await server.model()
            if fields and not is_ours:
                raise ConfigError(
                    f"--compare off: {server.base} is no Drafthouse, so no request can switch its "
                    "drafts off; start it again without them, and compare with that server's URL"
                )
            fields = {"model": arguments.model or model, **_fields(arguments), **fields}
            # What the other side's requests have left in the prefix cache, or taught a drafter,
            # would help this one.
            salted = is_ours and bool(arguments.compare)
            sides.append(Side(server, asked, fields, name, salted=salted))
        rounds = arguments.rounds or len(sides)
        first, goodput = sides[0], dict(arguments.goodput)
        report = Report(first.server.base, first.fields, len(asked), rounds, goodput)
        rates = [Level(rate=rate) for rate in arguments.rate]
        for level in rates or [Level(count) for count in arguments.concurrency]:
            await _compare(report, sides, level, arguments)
        return report


def _asked(arguments: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """The name, the URL and the fields of its own of each side."""
    own, other = arguments.url, arguments.compare
    if not other:
        return [("", own, {})]
    if other == _OFF:
        return [("drafts", own, {}), ("no drafts", own, {"speculation": {"enabled": False}})]
    return [(own, own, {}), (other, other, {})]


def _fields(arguments: argparse.Namespace) -> dict[str, Any]:
    fields = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    if arguments.temperature:
        fields["seed"] = arguments.seed
    if arguments.ignore_eos:
        fields["ignore_eos"] = True
    return fields


async def _compare(
    report: Report, sides: Sequence[Side], level: Level, arguments: argparse.Namespace
) -> None:
    """One load.  Where sides are compared they are asked block by block, each in its turn and in
    changing order, so that whatever the machine does meets both."""
    # Of each block its answers, the seconds that they took, and what was counted meanwhile.
    found = [(side, list[tuple[list[TimedAnswer], float, Page]]()) for side in sides]
    for side in sides:
        await _warm_up(side, arguments.warmups)
    size = level.concurrency if len(sides) > 1 and level.concurrency else report.num_prompts
    starts = range(0, report.num_prompts, size)
    turns = list(product(starts, range(report.rounds)))
    for turn, (start, again) in enumerate(turns):
        about = f"{level}, round {again + 1} of {report.rounds}"
        say(f"{about}, from prompt {start + 1} of {report.num_prompts}")
        for side, blocks in found if turn % 2 == 0 else reversed(found):
            before = await _page(side.server)
            block = range(report.num_prompts)[start : start + size]
            answers, took_s = await load(side, block, level, arguments.seed + again)
            counted = (await _page(side.server)).since(before)
            # Rounds of the same prompts are one measurement, unless there are few others.
            unit = start // size if len(starts) >= _FEW_BLOCKS else turn
            for each in answers:
                each.unit = unit
            blocks.append((answers, took_s, counted))
    for side, blocks in found:
        parts, seconds, counts = zip(*blocks, strict=True)
        answers = [*chain(*parts)]
        numbers = figures(answers, sum(seconds), report.goodput)
        report.runs.append(Run(level, side.name, answers, numbers, speculation(counts)))


def prompts(path: Path | None, count: int | None, *, is_chat: bool) -> list[dict[str, Any]]:
    """`count` prompts, the first again where there are fewer; None = all, each once.

    Each is the field of a request that holds it.  Raises ConfigError for a file with a bad line.
    """
    found: list[dict[str, Any]] = []
    for prompt in read_prompts(path, ()) if path else map(EvaluatedPrompt, QUESTIONS):
        said = ({"role": "user", "content": prompt.text},)
        if is_chat:
            found.append({"messages": prompt.messages or said})
        elif prompt.messages in ((), said):
            found.append({"prompt": prompt.text})
        else:
            raise ConfigError(
                f"{path}: messages are for the chat endpoint; leave out --endpoint completions"
            )
    return list(islice(cycle(found), len(found) if count is None else count))


async def _warm_up(side: Side, count: int) -> None:
    """Ask the first prompt `count` times; raises WorkerError if the server refuses it."""
    answers, _ = await load(side, [0] * count, Level(1), 0)
    for answer in answers:
        if answer.error:
            raise WorkerError(answer.error)


async def _page(server: OpenAIServer) -> Page:
    """The server's figures now; an empty page where it shows none."""
    try:
        return Page.read(await server.metrics() or "")
    except (ValueError, WorkerError):
        return Page({})


def off_or_url(text: str) -> str:
    """Read what is compared with."""
    return text if text == _OFF else url(text)


def bound(text: str) -> tuple[str, float]:
    """Read a bound of good answers."""
    name, _, bound = text.partition(":")
    if name not in GOODPUT:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected NAME:MILLISECONDS with a name of {', '.join(GOODPUT)}"
        )
    return name, number()(bound)
