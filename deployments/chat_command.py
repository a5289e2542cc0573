"""`drafthouse chat`, a conversation in the terminal with any OpenAI-compatible server; and
`drafthouse try`, one question to a running server, with speculation on and off."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from statistics import fmean
from typing import Any, TextIO

import httpx

from cluster.errors import ConfigError, DrafthouseError
from cluster.logs import say
from cluster.requests.idle import MEANINGS
from cluster.spec.interval import Interval
from deployments.coloured import coloured, legend
from deployments.openai_client import AnswerPiece, OpenAIServer, RefusedError, StreamedAnswer
from deployments.report import rendered

_HELP = "/reset forgets the conversation, /draft on|off switches drafts, /quit ends (as Ctrl-D)"
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def chat(arguments: argparse.Namespace) -> int:
    """Talk until the end of the input; without a terminal, standard input is one question."""
    conversation = ChatHistory(arguments, sys.stdout, sys.stderr)
    if sys.stdin.isatty():
        conversation.talk(_typed())
    else:
        conversation.ask(sys.stdin.read())
    return 0


def _typed() -> Iterator[str]:
    import readline  # noqa: F401  input() has a history with it

    while True:
        try:
            yield input("> ")
        except EOFError:
            return


@dataclass(slots=True)
class ChatHistory:
    """What was said so far, and how the next answer is asked for.

    answers go to `out`, all else to `notes`.  drafters: in the order in which they appeared, which
    gives them their colours.
    """

    arguments: argparse.Namespace
    out: TextIO
    notes: TextIO
    transport: httpx.AsyncBaseTransport | None = None
    clock: Callable[[], float] = time.monotonic
    messages: list[dict[str, str]] = field(default_factory=list)
    drafters: list[str] = field(default_factory=list)
    drafts: bool = True

    def __post_init__(self) -> None:
        self.drafts = not self.arguments.no_drafts
        self.reset()

    def reset(self) -> None:
        """Forget all but the system message."""
        system = self.arguments.system
        self.messages = [{"role": "system", "content": system}] if system else []

    def talk(self, lines: Iterator[str]) -> None:
        """Answer every line, or do what it commands; what goes wrong is said, and the talk goes
        on."""
        self._note(_HELP)
        for line in lines:
            if line.startswith("/"):
                if line.strip() in ("/quit", "/exit"):
                    return
                self._note(self._command(*line.split()))
            elif line.strip():
                try:
                    self.ask(line)
                except DrafthouseError as error:
                    self._note(error.message)
                except UnicodeError:
                    self._note("the line is not valid UTF-8")
                except KeyboardInterrupt:
                    self._note("\nstopped; neither the question nor the answer is kept")

    def ask(self, text: str) -> None:
        """Stream the answer and say how fast it came; both are kept once it is whole.

        Raises ConfigError for an empty question, UnicodeError for one that is no text.
        """
        if not text.strip():
            raise ConfigError("the question is empty; write it to standard input")
        text.encode()
        asked = [*self.messages, {"role": "user", "content": text}]
        answer = asyncio.run(self._answer(asked))
        self.messages = [*asked, {"role": "assistant", "content": answer}]

    def _command(self, name: str, *words: str) -> str:
        if name == "/reset":
            self.reset()
            return "the conversation begins anew"
        if name == "/draft" and words in (("on",), ("off",)):
            self.drafts = words == ("on",)
            return f"drafts are {words[0]}"
        return _HELP

    async def _answer(self, messages: list[dict[str, str]]) -> str:
        answer = StreamedAnswer(self.clock)
        async with OpenAIServer(
            self.arguments.url, self.arguments.api_key, self.transport
        ) as server:
            model, is_ours = await server.model()
            async for event in server.events(self._body(model, messages, is_ours=is_ours)):
                for piece in answer.take(event):
                    self._show(piece)
        self.out.write("\n")
        self._note(_speed(answer))
        return answer.text

    def _body(self, model: str, messages: list[dict[str, str]], *, is_ours: bool) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.arguments.model or model,
            "messages": messages,
            "max_tokens": self.arguments.max_tokens,
            "temperature": self.arguments.temperature,
            "stream_options": {"include_usage": True},
        }
        if self.arguments.seed is not None:
            body["seed"] = self.arguments.seed
        if is_ours:
            body |= {"return_draft_sources": True, "speculation": {"enabled": self.drafts}}
        elif not self.drafts:
            self._note("/draft off: this server is no Drafthouse, and drafts as it likes")
        return body

    def _show(self, piece: AnswerPiece) -> None:
        text = piece.text
        for token in piece.tokens:
            if token.owner and token.owner not in self.drafters:
                self.drafters.append(token.owner)
        if self.out.isatty():  # else only the answer itself is wanted
            text = coloured(text, piece.tokens, self.drafters, in_colour=True)
            text = f"{_DIM}{piece.thought}{_PLAIN}{text}" if piece.thought else text
        self.out.write(text)
        self.out.flush()

    def _note(self, text: str) -> None:
        self.notes.write(f"{_DIM}{text}{_PLAIN}\n" if self.notes.isatty() else f"{text}\n")
        self.notes.flush()


def _speed(answer: StreamedAnswer) -> str:
    """One line: how many tokens, how fast, and whose they were."""
    if not answer.times:
        return "an empty answer"
    line = f"{answer.num_tokens} tokens, first after {1e3 * answer.ttft_s:.0f} ms"
    if answer.e2e_s > 0.0:
        line += f", {answer.num_tokens / answer.e2e_s:.1f} tokens/s"
    if owners := answer.by_drafter:
        shares = ", ".join(f"{name} {share}" for name, share in owners.most_common())
        line += f"; {owners.total()} drafted ({shares})"
    return line


# The first requests after a start are slower than those that follow.
_WARM_UP_TOKENS = 4
# Of each answer; a ratio of shorter ones is chance.
_LEAST_TOKENS = 100
# What comes faster came together: no model takes so little for a token.
_FASTEST_TOKEN_S = 0.0001


def try_once(arguments: argparse.Namespace) -> int:
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
    """As `try_once`; transport: carries the requests, None = the network."""
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
        "legend": legend(names, in_colour=in_colour),
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
