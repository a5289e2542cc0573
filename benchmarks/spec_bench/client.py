"""Asks questions over OpenAI's endpoints, as any client would: the same for every server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.spec_bench.questions import Question
from benchmarks.support.answers import Law
from cluster.errors import WorkerError
from cluster.records import frozen
from deployments.openai_client import OpenAIServer, RefusedError, StreamedAnswer

# A server's status for a question that is too long for its model.
_TOO_LONG = 400


@frozen
class Turn:
    """One answer.  Times are seconds of one clock: of its end where no piece came.

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


@dataclass(slots=True)
class Asker:
    """Asks one server.

    extra: fields of every request that are the server's own.  is_ours: it is told each question's
    task, and its id as the seed, so that answers of different runs can be compared.  refused: ids
    of the questions that the server refused so far.
    """

    server: OpenAIServer
    model: str
    law: Law
    max_tokens: int
    extra: dict[str, Any] = field(default_factory=dict)
    is_ours: bool = True
    refused: list[int] = field(default_factory=list)

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
                except RefusedError as error:
                    if error.status != _TOO_LONG:
                        raise RuntimeError(f"question {question.id}: {error.message}") from error
                    self.refused.append(question.id)
                except WorkerError as error:
                    raise RuntimeError(f"question {question.id}: {error.message}") from error
                answered()

        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(waiting))):
                group.create_task(converse())
        return turns

    async def ask(self, question: Question) -> list[Turn]:
        """Ask a question's turns.  Raises RefusedError, or WorkerError if the server fails."""
        if question.prompt:
            # As many tokens as are asked for, whatever they are.
            asked = {"prompt": list(question.prompt), "ignore_eos": True}
            return [await self._answer(question, 0, asked)]
        messages: list[dict[str, str]] = []
        turns = []
        for index, text in enumerate(question.turns):
            messages.append({"role": "user", "content": text})
            turn = await self._answer(question, index, {"messages": messages})
            messages.append({"role": "assistant", "content": turn.text})
            turns.append(turn)
        return turns

    async def _answer(self, question: Question, index: int, asked: dict[str, Any]) -> Turn:
        body = {
            "model": self.model,
            **asked,
            "max_tokens": self.max_tokens,
            "temperature": self.law.temperature,
            # Some servers apply a checkpoint's sampling defaults; these fields override them.
            "top_p": 1.0,
            "stream_options": {"include_usage": True},
            **self.extra,
            **question.request,
        }
        if self.is_ours and question.task:
            body["metadata"] = {"task": question.task}
        if self.is_ours and self.law.temperature > 0.0:
            body["seed"] = question.id
        answer = StreamedAnswer(time.perf_counter)
        async for event in self.server.events(body):
            answer.take(event)
        times, statistics = answer.times or [time.perf_counter()], answer.statistics
        return Turn(
            question.id,
            question.category,
            index,
            answer.asked_s,
            times[0],
            times[-1],
            int(answer.usage.get("completion_tokens", 0)),
            answer.finish_reason,
            answer.text,
            int(statistics.get("num_spec_steps") or 0),
            int(statistics.get("num_draft_tokens") or 0),
            int(statistics.get("num_accepted_draft_tokens") or 0),
        )
