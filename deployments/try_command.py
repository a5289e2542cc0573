"""`drafthouse try`: one question to a running server, with speculation on and off."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from statistics import fmean
from typing import Any, TextIO

import httpx

from cluster.coordinator.idle import MEANINGS
from cluster.logs import say
from cluster.spec.interval import Interval
from deployments.coloured import coloured, legend
from deployments.openai_client import OpenAIServer, RefusedError, StreamedAnswer
from deployments.report import rendered

# The first requests after a start are slower than those that follow.
_WARM_UP_TOKENS = 4
# Of each answer; a ratio of shorter ones is chance.
_LEAST_TOKENS = 100
# What comes faster came together: no model takes so little for a token.
_FASTEST_TOKEN_S = 0.0001


def run(arguments: argparse.Namespace) -> int:
    """Ask, and say what came of it; 0 if both answers are the same text, else 1.

    Raises WorkerError where no server answers, or where it refuses the question.
    """
    return asyncio.run(compare(arguments, sys.stdout))


async def compare(
    arguments: argparse.Namespace,
    out: TextIO,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """As `run`; transport: carries the requests, None = the network."""
    prompt, fields = arguments.prompt, dict[str, Any]()
    if not prompt:
        presets = (files("deployments.page") / "static" / "presets.json").read_text("utf-8")
        chosen = random.choice(json.loads(presets))
        prompt, fields = chosen["prompt"], chosen["fields"]
    answers: dict[bool, list[StreamedAnswer]] = {True: [], False: []}
    async with OpenAIServer(arguments.url, arguments.api_key, transport) as client:
        model, _ = await client.model()
        body = {
            **fields,
            "model": model,
            "temperature": arguments.temperature,
            "seed": arguments.seed,
            "return_draft_sources": True,
            "messages": [{"role": "user", "content": prompt}],
        }

        async def ask(max_tokens: int, *, speculates: bool) -> StreamedAnswer:
            """Each time with another salt: what the server has learned from other texts, or keeps
            of the prompt, helps neither answer more than the other."""
            own = {"max_tokens": max_tokens, "speculation": {"enabled": speculates}}
            answer = StreamedAnswer(clock)
            async for event in client.events(body | own | {"cache_salt": secrets.token_hex(8)}):
                answer.take(event)
            return answer

        try:
            await ask(_WARM_UP_TOKENS, speculates=True)
        except RefusedError as error:
            if "no chat template" not in error.message:
                raise
            del body["messages"]
            body["prompt"] = prompt
            await ask(_WARM_UP_TOKENS, speculates=True)
        for speculates in (True, False, False, True):
            say(f"asking {'with speculation' if speculates else 'without'}")
            answers[speculates].append(await ask(arguments.max_tokens, speculates=speculates))
    drafted, *others = (*answers[True], *answers[False])
    differing = [
        each.text
        for each in others
        if (each.text, each.finish_reason) != (drafted.text, drafted.finish_reason)
    ]
    owners, in_colour = dict(drafted.by_drafter.most_common()), out.isatty()
    names = [*owners]
    seen = {
        **body,
        "base": client.base,
        "prompt": prompt,
        "text": coloured(drafted.text, drafted.tokens, names, in_colour=in_colour),
        "legend": legend(names, in_colour=in_colour) if names else "",
        "answer": drafted,
        "sides": {
            "with speculation": _side(answers[True]),
            "without": _side(answers[False]),
        },
        "ratio": _ratio(answers),
        "least_tokens": _LEAST_TOKENS,
        "idle": MEANINGS.get(drafted.statistics.get("idle_because") or "unknown", "see the log"),
        "owners": owners,
        "shared": Counter(name for token in drafted.tokens for name in token.drafters[1:]),
        "differing": differing,
    }
    out.write(rendered("try", seen))
    return int(bool(differing))


def _rate(answer: StreamedAnswer) -> float:
    """Tokens per second after the first step, which is the prompt's and has no drafts; 0 where it
    was not timed.

    As the server has measured it: pieces may come together, whatever lay between their steps.
    """
    num_tokens = len(answer.tokens) - 1
    time_s = float(answer.statistics.get("decode_time_s", 0.0))
    return num_tokens / time_s if time_s >= _FASTEST_TOKEN_S * num_tokens > 0.0 else 0.0


def _side(answers: Sequence[StreamedAnswer]) -> dict[str, float]:
    rates = [rate for rate in map(_rate, answers) if rate]
    first_s = answers[0].ttft_s if answers[0].times else 0.0
    return {"rate": fmean(rates or [0.0]), "first_token_s": first_s}


def _ratio(answers: Mapping[bool, Sequence[StreamedAnswer]]) -> str:
    """The ratio of the rates; "" where it would say nothing."""
    rates = [[*map(_rate, side)] for side in answers.values()]
    if len(answers[True][0].tokens) < _LEAST_TOKENS or not all(map(all, rates)):
        return ""
    return Interval.of_ratios([[one / other for one, other in zip(*rates, strict=True)]]).told
