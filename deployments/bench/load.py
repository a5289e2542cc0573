"""Asks one server many prompts: so many at a time, or as they arrive at random."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from cluster.errors import WorkerError
from cluster.records import frozen
from deployments.bench.answers import TimedAnswer
from deployments.openai_client import OpenAIServer, StreamedAnswer


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
    answer, error = StreamedAnswer(clock), ""
    try:
        async for event in side.server.events(side.body(index)):
            answer.take(event)
    except WorkerError as caught:
        error = caught.message
    # Its end stands for its pieces where no token came before it.
    arrivals = answer.times or [clock()] * bool(answer.finish_reason)
    if not arrivals:
        error = error or "the answer is empty"
    return TimedAnswer(
        index,
        answer.asked_s,
        tuple(arrivals),
        answer.num_tokens,
        int(answer.usage.get("prompt_tokens") or 0),
        answer.text,
        answer.asked_s - due_s if due_s is not None else 0.0,
        error,
    )
