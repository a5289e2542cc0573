"""Asks one server many prompts: so many at a time, or as they arrive at random; and says by their
times how that went.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from cluster.errors import WorkerError
from cluster.records import frozen
from cluster.spec.interval import Interval
from deployments.openai_client import OpenAIServer, StreamedAnswer

# What a client notes of one answer, and the figures of many and ratios of two sides: pure
# functions of their times.
#
# The definitions are those of `vllm bench serve`, and so are the figures' names, so that what reads
# its results reads ours.

# The times of a good answer that --goodput may bound.
GOODPUT = ("ttft", "tpot", "e2el")
_PERCENTILES = (95, 99)


@dataclass(slots=True)
class TimedAnswer(StreamedAnswer):
    """One request as its client saw it.  All times are seconds of one clock.

    prompt: its place among the prompts.  unit: of what is compared, both sides of which were asked
    one right after the other.  late_s: how much later than planned it was sent.  error: why it
    failed.
    """

    prompt: int = 0
    unit: int = 0
    late_s: float = 0.0
    error: str = ""

    @property
    def latencies_s(self) -> dict[str, list[float]]:
        """All times by their names: to the first token, of each output token after it, between two
        pieces of the answer, whatever number of tokens they bring, and to the last token."""
        num_later = self.num_tokens - 1
        return {
            "ttft": [self.ttft_s],
            "tpot": [(self.e2e_s - self.ttft_s) / num_later] if num_later > 0 else [],
            "itl": [later - sooner for sooner, later in pairwise(self.times)],
            "e2el": [self.e2e_s],
        }


def figures(
    answers: Sequence[TimedAnswer], duration_s: float, goodput: Mapping[str, float]
) -> dict[str, float]:
    """The figures of one run by the names of `vllm bench serve`; times in milliseconds.

    duration_s: from before the first request to after the last answer.  goodput: bounds in
    milliseconds by the names of GOODPUT; an answer within all of them is good.  A time that no
    answer has is missing.
    """
    good = [answer for answer in answers if not answer.error]
    prompt_tokens = sum(int(answer.usage.get("prompt_tokens") or 0) for answer in good)
    tokens = sum(answer.num_tokens for answer in good)
    found: dict[str, float] = {
        "duration": duration_s,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt_tokens,
        "total_output_tokens": tokens,
        "request_throughput": len(good) / duration_s,
        "output_throughput": tokens / duration_s,
        "total_token_throughput": (prompt_tokens + tokens) / duration_s,
    }
    times = [each.latencies_s for each in good]
    if goodput:
        kept = [
            all(1e3 * value <= most for name, most in goodput.items() for value in each[name])
            for each in times
        ]
        found["request_goodput"] = sum(kept) / duration_s
    for name in times[0] if times else ():
        if values := [value for each in times for value in each[name]]:
            found |= _spread(name, 1e3 * np.array(values))
    return found


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    found = {f"mean_{name}_ms": np.mean(values), f"median_{name}_ms": np.median(values)}
    found |= {f"p{share}_{name}_ms": np.percentile(values, share) for share in _PERCENTILES}
    return {key: float(value) for key, value in found.items()}


# Of each answer a numerator and a denominator: a side's figure is the quotient of their sums.
Parts = Callable[[TimedAnswer], tuple[float, float]]
FIGURES: Mapping[str, Parts] = {
    "tokens/s of a request": lambda answer: (answer.num_tokens, answer.e2e_s),
    "TTFT": lambda answer: (answer.ttft_s, 1.0),
    "TPOT": lambda answer: (answer.e2e_s - answer.ttft_s, max(answer.num_tokens - 1, 0)),
}


def ratios(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> dict[str, Interval]:
    """The ratios of FIGURES over what both sides answered; those that exist.

    Each unit gives one ratio.  They differ by their prompts and by the minute in which they were
    measured, so the interval of their mean has both in it.
    """
    sides = [[each for each in answers if not each.error] for answers in (first, second)]
    answered = [{(each.unit, each.prompt) for each in side} for side in sides]
    both = answered[0] & answered[1]
    found = {}
    for name, parts in FIGURES.items():
        # Of each unit the sums of both parts, by side.
        sums = {unit: np.zeros((2, 2)) for unit, _ in sorted(both)}
        for place, side in enumerate(sides):
            for each in side:
                if (each.unit, each.prompt) in both:
                    sums[each.unit][place] += parts(each)
        own = [
            float((one[0] / one[1]) / (other[0] / other[1]))
            for one, other in sums.values()
            if min(*one, *other) > 0.0
        ]
        if own:
            found[name] = Interval.of_ratios([own])
    return found


def equal_texts(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> tuple[int, int]:
    """How many prompts have the same text on both sides, in every round, and of how many."""
    texts: dict[int, tuple[set[str], set[str]]] = {}
    for place, answers in enumerate((first, second)):
        for each in answers:
            if not each.error:
                texts.setdefault(each.prompt, (set(), set()))[place].add(each.text)
    both = [one | other for one, other in texts.values() if one and other]
    return sum(len(each) == 1 for each in both), len(both)


@frozen
class Level:
    """How the requests come: `concurrency` at a time, or `rate` a second, as a Poisson process."""

    concurrency: int = 0
    rate: float = 0.0

    def __str__(self) -> str:
        return f"{self.rate:g} a second" if self.rate else f"{self.concurrency} at a time"


@frozen
class Side:
    """One server, and what it is asked: the fields of every request, and for each prompt the field
    that holds it.

    name: "" where nothing is compared.  salted: every request has a salt of its own, as vLLM and
    Drafthouse understand it.
    """

    server: OpenAIServer
    prompts: Sequence[Mapping[str, Any]]
    fields: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""
    salted: bool = False

    def body(self, index: int) -> dict[str, Any]:
        salt = {"cache_salt": secrets.token_hex(8)} if self.salted else {}
        usage = {"stream_options": {"include_usage": True}}
        return {**self.fields, **usage, **salt, **self.prompts[index]}


async def load(
    side: Side, places: Sequence[int], level: Level, seed: int
) -> tuple[list[TimedAnswer], float]:
    """Ask each of some prompts; returns the answers in order, and the seconds that all took.

    places: of them among the side's.  seed: of the arrivals.  A request that fails is an answer
    with an error.
    """
    clock = asyncio.get_running_loop().time
    began = clock()
    if level.rate:
        gaps = np.random.default_rng(seed).exponential(1.0 / level.rate, len(places))
        due = began + np.cumsum(gaps) - gaps[0]
        answers = await asyncio.gather(
            *(ask(side, *asked) for asked in zip(places, due.tolist(), strict=True))
        )
    else:
        waiting = iter(places)

        async def ask_in_turn() -> list[TimedAnswer]:
            return [await ask(side, index) for index in waiting]

        askers = [ask_in_turn() for _ in range(min(level.concurrency, len(places)))]
        answers = [each for own in await asyncio.gather(*askers) for each in own]
    return sorted(answers, key=lambda answer: answer.prompt), clock() - began


async def ask(side: Side, index: int, due_s: float | None = None) -> TimedAnswer:
    """Ask one prompt and note what comes when; due_s: when it is to be sent, None = now."""
    clock = asyncio.get_running_loop().time
    if due_s is not None:
        await asyncio.sleep(due_s - clock())
    answer = TimedAnswer(clock, prompt=index)
    if due_s is not None:
        answer.late_s = answer.asked_s - due_s
    try:
        async for event in side.server.events(side.body(index)):
            answer.take(event)
    except WorkerError as error:
        answer.error = error.message
    if not answer.times:
        if answer.finish_reason:  # its end stands for its pieces where no token came before it
            answer.usage = {"completion_tokens": 0, **answer.usage}
            answer.times.append(clock())
        else:
            answer.error = answer.error or "the answer is empty"
    return answer
