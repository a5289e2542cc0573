"""`drafthouse try`: one question to a running server, with speculation on and off."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

from cluster.coordinator.idle import MEANINGS
from cluster.errors import DrafthouseError, WorkerError
from deployments.coloured import Token, coloured, legend

# Asked where no prompt is given: everyday questions, long enough answers.
_QUESTIONS = (
    "How do vaccines work? Explain it to a ten-year-old.",
    "Write a Python function that finds the longest common prefix of a list of strings.",
    "What should I pack for a week of hiking in the mountains?",
    "Summarise the plot of Romeo and Juliet in one paragraph.",
    "A train leaves at 9:40 and arrives at 13:05. How long does the journey take? Show the steps.",
    "Compare tea and coffee: where they come from, how they are made, what they do to you.",
)
# The first requests after a start are slower than those that follow.
_WARM_UP_TOKENS = 4
_TIMEOUT = httpx.Timeout(600.0, connect=5.0)
# What comes faster came together: no model takes so little for a token.
_FASTEST_TOKEN_S = 0.0001


@dataclass(frozen=True, slots=True)
class Question:
    """What to ask; prompt "" = one of our own.  seed, temperature: the same for both answers."""

    prompt: str = ""
    max_tokens: int = 200
    temperature: float = 0.0
    seed: int = 1
    api_key: str = ""


@dataclass(slots=True)
class Answer:
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


def try_server(
    url: str,
    question: Question,
    out: TextIO,
    *,
    say: Callable[[str], None] = lambda text: None,
    transport: httpx.BaseTransport | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Ask, and write what came of it to `out`; 0 if both answers are the same text, else 1.

    say: is told what is being done.  transport: carries the requests, None = the network.  Raises
    WorkerError where no server answers, or where it refuses the question.
    """
    base = url.rstrip("/").removesuffix("/v1")
    prompt = question.prompt or random.choice(_QUESTIONS)
    with httpx.Client(base_url=base, timeout=_TIMEOUT, transport=transport) as client:
        if question.api_key:
            client.headers["Authorization"] = f"Bearer {question.api_key}"
        server = _Server(client, base, clock)
        server.ask(prompt, question, _WARM_UP_TOKENS, speculates=True)
        say("asking with speculation")
        drafted = server.ask(prompt, question, question.max_tokens, speculates=True)
        say("asking without")
        plain = server.ask(prompt, question, question.max_tokens, speculates=False)
    law = f"temperature {question.temperature:g}" if question.temperature else "greedy"
    out.write(f"{server.model} at {base}, {law}, {len(drafted.tokens)} tokens\n\n> {prompt}\n\n")
    names = list(_owners(drafted))
    out.write(coloured(drafted.text, drafted.tokens, names, in_colour=out.isatty()) + "\n\n")
    if names:
        out.write(legend(names, in_colour=out.isatty()) + "\n\n")
    out.write(_figures(drafted, plain))
    if (drafted.text, drafted.finish_reason) == (plain.text, plain.finish_reason):
        out.write("both answers are the same text\n")
        return 0
    out.write(
        "\nTHE TWO ANSWERS DIFFER, which speculation must never cause.  Rounding can, where two\n"
        "tokens are all but equally likely (target.engine.reproducible: true rules that out);\n"
        f"else it is a fault of the server: please report it, with the seed {question.seed}.\n\n"
        f"without speculation it was:\n{plain.text}\n"
    )
    return 1


def _owners(answer: Answer) -> dict[str, int]:
    """How many tokens of the text count for each drafter, most first."""
    return dict(Counter(token.owner for token in answer.tokens if token.owner).most_common())


def _figures(drafted: Answer, plain: Answer) -> str:
    answers = {"with speculation": drafted, "without": plain}
    # Both are measured alike, or their ratio says nothing.
    taken = {name: answer.after_first for name, answer in answers.items()}
    note = ""
    if not all(taken.values()):
        taken = {name: answer.in_all for name, answer in answers.items()}
        note = "from the question on, for the steps after the first could not be timed"
    rates = {name: found[0] / found[1] if found else None for name, found in taken.items()}
    lines = [
        f"{name:20}{_shown(rates[name])} tokens/s   first token after "
        f"{1000 * answer.first_token_s:.0f} ms"
        for name, answer in answers.items()
    ]
    with_drafts, without = rates.values()
    if with_drafts and without:
        lines.append(f"{'ratio':20}{_shown(with_drafts / without, digits=2)}")
    if note:
        lines.append(f"({note})")
    return "\n".join([*lines, *_shares(drafted)]) + "\n"


def _shown(value: float | None, digits: int = 1) -> str:
    return f"{'-':>8}" if value is None else f"{value:8.{digits}f}"


def _shares(drafted: Answer) -> list[str]:
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


class _Server:
    """Asks one server, as a chat where its model has a template for that."""

    def __init__(self, client: httpx.Client, base: str, clock: Callable[[], float]) -> None:
        self._client = client
        self._base = base
        self._clock = clock
        self._is_chat = True
        self.model = self._model()

    def ask(self, prompt: str, question: Question, max_tokens: int, *, speculates: bool) -> Answer:
        """The whole answer, streamed.

        Each time with another salt: what the server has learned from other texts, or keeps of the
        prompt, helps neither answer more than the other.
        """
        body = {
            "model": self.model, "max_tokens": max_tokens, "temperature": question.temperature,
            "seed": question.seed, "stream": True, "cache_salt": secrets.token_hex(8),
            "speculation": {"enabled": speculates}, "return_draft_sources": True,
        }  # fmt: skip
        try:
            return self._stream(prompt, body)
        except _NoTemplateError:
            self._is_chat = False
            return self._stream(prompt, body)

    def _model(self) -> str:
        try:
            reply = self._client.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except httpx.ConnectError as error:
            raise WorkerError(
                f"nothing answers at {self._base}; start a server with `drafthouse serve`, or name "
                "the address of one"
            ) from error
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise WorkerError(
                f"{self._base}/v1/models does not list a model ({error}); is this a Drafthouse "
                "server?"
            ) from error

    def _stream(self, prompt: str, body: Mapping[str, Any]) -> Answer:
        if self._is_chat:
            path = "/v1/chat/completions"
            body = {**body, "messages": [{"role": "user", "content": prompt}]}
        else:
            path, body = "/v1/completions", {**body, "prompt": prompt}
        answer, began = Answer(), self._clock()
        try:
            with self._client.stream("POST", path, json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise _refusal(reply, self._base)
                for line in reply.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self._take(answer, json.loads(line[6:]), began)
        except httpx.HTTPError as error:
            raise WorkerError(f"{self._base} broke off its answer ({error})") from error
        return answer

    def _take(self, answer: Answer, event: Mapping[str, Any], began: float) -> None:
        if "error" in event:
            raise WorkerError(f"{self._base}: {event['error'].get('message')}")
        answer.statistics = event.get("metrics", {}).get("speculative_decoding", answer.statistics)
        for choice in event["choices"]:
            delta = choice.get("delta", {})
            answer.text += delta.get("content") or choice.get("text") or ""
            answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
            sources = choice.get("draft_sources") or ()
            answer.tokens += [
                Token(bytes(each["bytes"]), tuple(each["drafters"])) for each in sources
            ]
            if sources:
                answer.times.append((self._clock() - began, len(sources)))


class _NoTemplateError(DrafthouseError):
    """The model takes no conversations."""


def _refusal(reply: httpx.Response, base: str) -> DrafthouseError:
    try:
        message = str(reply.json()["error"]["message"])
    except (ValueError, LookupError, TypeError):
        message = reply.text[:200]
    if "no chat template" in message:
        return _NoTemplateError(message)
    return WorkerError(f"{base} refuses the question (HTTP status {reply.status_code}): {message}")
