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
from dataclasses import dataclass, field
from importlib.resources import files
from operator import attrgetter
from statistics import fmean
from typing import Any, TextIO

import httpx

from cluster.coordinator.idle import MEANINGS
from cluster.logs import say
from cluster.spec.interval import Interval
from deployments.bench.ratios import told
from deployments.coloured import Token, coloured, legend, sources
from deployments.openai_client import OpenAIServer, RefusedError, choices, said

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


@dataclass(slots=True)
class TriedAnswer:
    """times: when its pieces came, in seconds since it was asked, with the tokens of each."""

    text: str = ""
    finish_reason: str = ""
    tokens: list[Token] = field(default_factory=list)
    times: list[tuple[float, int]] = field(default_factory=list)
    statistics: Mapping[str, Any] = field(default_factory=dict)

    @property
    def first_token_s(self) -> float:
        return self.times[0][0] if self.times else 0.0

    @property
    def after_first(self) -> tuple[int, float] | None:
        """The tokens after the first step, and the time from that step to the last; None where it
        is not known.

        As the server has measured it: pieces may come together, whatever lay between their steps.
        """
        if not self.times:
            return None
        (first_s, num_first), (last_s, _) = self.times[0], self.times[-1]
        time_s = last_s - first_s
        if "decode_time_s" in self.statistics:
            # The first step is the prompt's, which has no drafts.
            time_s, num_first = float(self.statistics["decode_time_s"]), 1
        return _measured(len(self.tokens) - num_first, time_s)

    @property
    def in_all(self) -> tuple[int, float] | None:
        """All tokens, and the time from the question to the last, where that is known."""
        return _measured(len(self.tokens), self.times[-1][0]) if self.times else None


def _measured(num_tokens: int, time_s: float) -> tuple[int, float] | None:
    is_measured = num_tokens > 0 and time_s >= _FASTEST_TOKEN_S * num_tokens
    return (num_tokens, time_s) if is_measured else None


async def compare(
    arguments: argparse.Namespace,
    out: TextIO,
    transport: httpx.AsyncBaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """As `run`; transport: carries the requests, None = the network."""
    prompt, fields = arguments.prompt, dict[str, Any]()
    if not prompt:
        presets = files("deployments.page") / "static" / "presets.json"
        chosen = random.choice(json.loads(presets.read_text("utf-8")))
        prompt, fields = chosen["prompt"], chosen["fields"]
    answers: dict[bool, list[TriedAnswer]] = {True: [], False: []}
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
        warm_up = {"max_tokens": _WARM_UP_TOKENS, "speculation": {"enabled": True}}
        try:
            await _answer(client, body | warm_up, clock)
        except RefusedError as error:
            if "no chat template" not in error.message:
                raise
            del body["messages"]
            body["prompt"] = prompt
            await _answer(client, body | warm_up, clock)
        for speculates in (True, False, False, True):
            say(f"asking {'with speculation' if speculates else 'without'}")
            own = {"max_tokens": arguments.max_tokens, "speculation": {"enabled": speculates}}
            answers[speculates].append(await _answer(client, body | own, clock))
    drafted = answers[True][0]
    law = f"temperature {arguments.temperature:g}" if arguments.temperature else "greedy"
    num_tokens = len(drafted.tokens)
    out.write(f"{model} at {client.base}, {law}, {num_tokens} tokens\n\n> {prompt}\n\n")
    names = list(_owners(drafted))
    out.write(coloured(drafted.text, drafted.tokens, names, in_colour=out.isatty()) + "\n\n")
    if names:
        out.write(legend(names, in_colour=out.isatty()) + "\n\n")
    out.write(_figures(answers[True], answers[False]))
    others = [
        each.text
        for each in (*answers[True], *answers[False])
        if (each.text, each.finish_reason) != (drafted.text, drafted.finish_reason)
    ]
    if not others:
        out.write("both answers are the same text\n")
        return 0
    out.write(
        "\nTHE TWO ANSWERS DIFFER, which speculation must never cause.  Rounding can, where two\n"
        "tokens are all but equally likely (target.engine.reproducible: true rules that out);\n"
        f"else it is a fault of the server: please report it, with the seed {arguments.seed}.\n\n"
        f"another time it was:\n{others[0]}\n"
    )
    return 1


def _owners(answer: TriedAnswer) -> dict[str, int]:
    """How many tokens of the text count for each drafter, most first."""
    return dict(Counter(token.owner for token in answer.tokens if token.owner).most_common())


def _figures(drafted: Sequence[TriedAnswer], plain: Sequence[TriedAnswer]) -> str:
    sides, answers = {"with speculation": drafted, "without": plain}, [*drafted, *plain]
    # All are measured alike, or their ratio says nothing.
    measured, note = attrgetter("after_first"), ""
    if not all(map(measured, answers)):
        measured = attrgetter("in_all")
        note = "from the question on, for the steps after the first could not be timed"
    rates = {
        name: [tokens / time_s for tokens, time_s in filter(None, map(measured, side))]
        for name, side in sides.items()
    }
    lines = [
        f"{name:20}{_shown(rates[name])} tokens/s   first token after "
        f"{1000 * side[0].first_token_s:.0f} ms"
        for name, side in sides.items()
    ]
    if min(len(each.tokens) for each in answers) < _LEAST_TOKENS:
        note = f"a ratio takes answers of {_LEAST_TOKENS} tokens or more: ask for a longer one"
    elif all(map(measured, answers)):
        pairs = zip(*rates.values(), strict=True)
        ratio = Interval.of_ratios([[one / other for one, other in pairs]])
        lines.append(f"{'ratio':20}    {told(ratio)}")
    if note:
        lines.append(f"({note})")
    return "\n".join([*lines, *_shares(drafted[0])]) + "\n"


def _shown(values: Sequence[float]) -> str:
    return f"{fmean(values):8.1f}" if values else f"{'-':>8}"


def _shares(drafted: TriedAnswer) -> list[str]:
    """Whose the tokens of the text were: all of them, each once."""
    stats, num_tokens = drafted.statistics, len(drafted.tokens)
    if not stats.get("num_spec_steps"):
        reason = stats.get("idle_because") or "unknown"
        return [f"no draft was verified ({reason}): {MEANINGS.get(reason, 'see the log')}"]
    by_drafter = _owners(drafted)
    num_own, num_accepted = sum(by_drafter.values()), stats["num_accepted_draft_tokens"]
    beyond = f" ({num_accepted - num_own} behind its end)" if num_accepted > num_own else ""
    lines = [
        f"accepted {num_accepted} of {stats['num_draft_tokens']} draft tokens{beyond}, "
        f"{stats['mean_acceptance_length']:.2f} tokens per step with drafts",
        f"the {num_tokens} tokens of the text:",
    ]
    rows = {**by_drafter, "the target itself": num_tokens - num_own}
    shared = Counter(name for token in drafted.tokens for name in token.drafters[1:])
    for name, count in rows.items():
        share = 100.0 * count / max(num_tokens, 1)
        also = f", and {shared[name]} more that another drafted too" if shared[name] else ""
        lines.append(f"  {name:18}{count:8d} ({share:.0f} %){also}")
    return lines


async def _answer(
    server: OpenAIServer, body: Mapping[str, Any], clock: Callable[[], float]
) -> TriedAnswer:
    """The whole answer, streamed.

    Each time with another salt: what the server has learned from other texts, or keeps of the
    prompt, helps neither answer more than the other.
    """
    answer, began = TriedAnswer(), clock()
    async for event in server.events({**body, "cache_salt": secrets.token_hex(8)}):
        answer.statistics = event.get("metrics", {}).get("speculative_decoding", answer.statistics)
        for choice in choices(event):
            answer.text += said(choice)
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            if tokens := sources(choice):
                answer.tokens += tokens
                answer.times.append((clock() - began, len(tokens)))
    return answer
