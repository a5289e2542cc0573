"""`drafthouse try`: one question to a running server, with speculation on and off."""

from __future__ import annotations

import json
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO

import httpx

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
_WHY_IDLE = {
    "disabled": "the server's configuration allows no drafts here",
    "no_drafter_for_model": "no drafter is configured, or none fits the model",
    "drafters_down": "its drafters are gone or were left alone after faults; see the server's log",
    "warming_up": "its drafters still load, or had no draft for this text; try again",
    "paused": "drafts have cost more time than they saved, so the server pauses them; try again",
    "not_worth_it": "making or verifying drafts would have cost more than it saves",
}


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
    def tokens_per_s(self) -> float:
        """After the first piece; of an answer that came in one piece, from the beginning."""
        if not self.times:
            return 0.0
        (first_s, num_first), (last_s, _) = self.times[0], self.times[-1]
        if last_s > first_s:
            return (len(self.tokens) - num_first) / (last_s - first_s)
        return len(self.tokens) / last_s if last_s else 0.0


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
    names = list(drafted.statistics.get("accepted_by_drafter", {}))
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


def _figures(drafted: Answer, plain: Answer) -> str:
    stats = drafted.statistics
    lines = [
        f"{name:20}{answer.tokens_per_s:8.1f} tokens/s   first token after "
        f"{1000 * answer.first_token_s:.0f} ms"
        for name, answer in (("with speculation", drafted), ("without", plain))
    ]
    if plain.tokens_per_s:
        lines.append(f"{'ratio':20}{drafted.tokens_per_s / plain.tokens_per_s:8.2f}")
    if stats.get("num_spec_steps"):
        lines.append(
            f"accepted {stats['num_accepted_draft_tokens']} of {stats['num_draft_tokens']} draft "
            f"tokens, {stats['mean_acceptance_length']:.2f} tokens per step with drafts"
        )
        for name, count in stats.get("accepted_by_drafter", {}).items():
            share = 100.0 * count / max(len(drafted.tokens), 1)
            lines.append(f"  {name:18}{count:8d} tokens ({share:.0f} % of the text)")
    else:
        reason = stats.get("idle_because") or "unknown"
        lines.append(f"no draft was verified ({reason}): {_WHY_IDLE.get(reason, 'see the log')}")
    return "\n".join(lines) + "\n"


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
