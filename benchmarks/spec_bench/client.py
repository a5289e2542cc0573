"""Asks questions over OpenAI's chat endpoint, as any client would: the same for every server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.spec_bench.questions import Question
from benchmarks.support.answers import Law


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer.  Times are seconds of one clock, None where no text came.

    steps, drafted, accepted: the server's figures of speculation for this answer.
    """

    question_id: int
    category: str
    turn: int
    submitted_s: float
    first_s: float
    last_s: float
    num_tokens: int
    finish_reason: str
    text: str
    steps: int = 0
    drafted: int = 0
    accepted: int = 0

    @classmethod
    def of(cls, data: dict[str, Any]) -> Turn:
        return cls(**data)

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.last_s - self.first_s

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first, which the prefill draws."""
        return self.num_tokens - 1


class RefusedError(Exception):
    """The server refuses a question, e.g. because it is too long for its model."""


@dataclass(slots=True)
class Asker:
    """Asks one server.

    extra: fields of every request that are the server's own.  seeded: each question's id is its
    seed, so that answers of different runs can be compared.  refused: ids of the questions that the
    server refused so far.  arrivals: (time, number of tokens), whenever the server told how many it
    has made: at an answer's end, or in every chunk if it is asked for continuous usage.
    """

    client: httpx.AsyncClient
    model: str
    law: Law
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    seeded: bool = True
    refused: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    async def ask_all(
        self, questions: Sequence[Question], concurrency: int, answered: Callable[[], object]
    ) -> list[Turn]:
        """Ask all questions, `concurrency` conversations at a time; returns the turns of those that
        are not refused."""
        waiting = list(questions)[::-1]
        turns: list[Turn] = []

        async def converse() -> None:
            while waiting:
                question = waiting.pop()
                try:
                    turns.extend(await self.ask(question))
                except RefusedError:
                    self.refused.append(question.id)
                answered()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(converse())
        return turns

    async def ask(self, question: Question) -> list[Turn]:
        """Ask a question's turns.  Raises RefusedError, or RuntimeError if the server fails."""
        messages: list[dict[str, str]] = []
        turns = []
        for index, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            turn = await self._answer(question, index, messages)
            messages.append({"role": "assistant", "content": turn.text})
            turns.append(turn)
        return turns

    async def _answer(self, question: Question, index: int, messages: list[dict[str, str]]) -> Turn:
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "temperature": self.law.temperature,
            # Some servers apply a checkpoint's sampling defaults; these fields override them.
            "top_p": 1.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
            **question.request,
        }
        if self.seeded and self.law.temperature > 0.0:
            body["seed"] = question.id
        pieces: list[str] = []
        times: list[float] = []
        usage: dict[str, Any] = {}
        statistics: dict[str, Any] = {}
        reason = ""
        submitted = time.perf_counter()
        async with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode("utf-8", "replace")
                error = RefusedError if response.status_code == 400 else RuntimeError
                raise error(
                    f"question {question.id} was answered with status {response.status_code}: "
                    f"{text[:300]}"
                )
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(f"question {question.id}: {chunk['error']}")
                if counted := chunk.get("usage"):
                    new = counted["completion_tokens"] - usage.get("completion_tokens", 0)
                    self.arrivals.append((time.perf_counter(), new))
                    usage = counted
                metrics = chunk.get("metrics") or {}
                statistics = metrics.get("speculative_decoding") or statistics
                for choice in chunk["choices"]:
                    content = choice["delta"].get("content")
                    if content:
                        pieces.append(content)
                        times.append(time.perf_counter())
                    reason = choice.get("finish_reason") or reason
        ended = time.perf_counter()
        return Turn(
            question.id, question.category, index, submitted,
            times[0] if times else ended, times[-1] if times else ended,
            int(usage.get("completion_tokens", 0)), reason, "".join(pieces),
            int(statistics.get("num_spec_steps") or 0),
            int(statistics.get("num_draft_tokens") or 0),
            int(statistics.get("num_accepted_draft_tokens") or 0),
        )  # fmt: skip
