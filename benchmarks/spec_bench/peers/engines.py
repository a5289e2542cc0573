"""Peers that are stepped directly, without HTTP and without a second process.

Run by a peer's own interpreter, which lacks our packages: `PYTHON -m
benchmarks.spec_bench.peers.engines MAKER MODEL --mode MODE` answers JSON lines.

question  {"questions": [{"id", "category", "turns": [str], "prompt": [token id]}], "max_tokens",
           "temperature", "concurrency"}
reply     {"turns": [fields of spec_bench.client.Turn], "refused": [id]}

A question with a `prompt` is that text, which is continued by `max_tokens` tokens.  Before a reply
comes a line `answered` for each question.  Times are seconds of the peer's own monotonic clock.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import field
from typing import Any, Protocol, TextIO

from cluster.records import frozen

READY = "ready"
ANSWERED = "answered"
Question = dict[str, Any]
Reply = dict[str, Any]
NO_DRAFTS = {"steps": 0, "drafted": 0, "accepted": 0}


@frozen
class Output:
    """One request's output so far.

    reason: why it has ended, "" = it goes on.  text: of an output that has ended.  statistics: the
    fields of `spec_bench.client.Turn` about speculation.
    """

    name: str
    token_ids: list[int]
    reason: str = ""
    text: str = ""
    statistics: dict[str, int] = field(default_factory=lambda: dict(NO_DRAFTS))


class Engine(Protocol):
    """A peer's engine.  Its module's `Engine` is created from the command line's arguments."""

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation by the model's own template."""
        ...

    def add(self, name: str, prompt: list[int], asked: Question, *, to_the_end: bool) -> bool:
        """Begin a request; False if it is refused.  to_the_end: nothing but max_tokens ends it."""
        ...

    def step(self) -> list[Output]:
        """Compute once; returns the requests that have new tokens or have ended."""
        ...


class Conversations:
    """Holds conversations, `concurrency` at a time, each turn with the answers before it."""

    def __init__(self, engine: Engine, told: Callable[[], object]) -> None:
        """told: called after each conversation."""
        self._engine = engine
        self._told = told
        self._count = 0
        self._open: dict[str, dict[str, Any]] = {}

    def answer(self, asked: Question) -> Reply:
        waiting = list(asked["questions"])[::-1]
        turns: list[dict[str, Any]] = []
        refused: list[int] = []
        while waiting or self._open:
            while waiting and len(self._open) < asked["concurrency"]:
                question = waiting.pop()
                if not self._ask(question, [], asked):
                    refused.append(question["id"])
                    self._told()
            for output in self._engine.step():
                turn = self._take(output)
                if turn is None:
                    continue
                conversation = self._open.pop(output.name)
                turns.append(turn)
                messages = [
                    *conversation["messages"],
                    {"role": "assistant", "content": turn["text"]},
                ]
                question = conversation["question"]
                if turn["turn"] + 1 >= len(question["turns"]):
                    self._told()
                elif not self._ask(question, messages, asked):
                    # As over HTTP: a conversation that is refused later counts nothing.
                    turns = [each for each in turns if each["question_id"] != question["id"]]
                    refused.append(question["id"])
                    self._told()
        return {"turns": turns, "refused": refused}

    def _ask(
        self, question: dict[str, Any], messages: list[dict[str, str]], asked: Question
    ) -> bool:
        """Ask the conversation's next turn; False if the engine refuses it."""
        prompt = list(question.get("prompt", ()))
        if is_chat := not prompt:
            said = {"role": "user", "content": question["turns"][len(messages) // 2]}
            messages = [*messages, said]
        self._count += 1
        name = str(self._count)
        submitted = time.perf_counter()
        if is_chat:
            prompt = self._engine.prompt(messages)
        if not self._engine.add(name, prompt, asked, to_the_end=not is_chat):
            return False
        self._open[name] = {
            "question": question,
            "messages": messages,
            "submitted_s": submitted,
            "times": [],
        }
        return True

    def _take(self, output: Output) -> dict[str, Any] | None:
        """Note a step's output; the whole turn once it has ended."""
        now = time.perf_counter()
        conversation = self._open[output.name]
        if output.token_ids:
            conversation["times"] = [*conversation["times"][:1], now]
        if not output.reason:
            return None
        times = conversation["times"] or [now]
        question = conversation["question"]
        return {
            "question_id": question["id"],
            "category": question["category"],
            "turn": len(conversation["messages"]) // 2,
            "submitted_s": conversation["submitted_s"],
            "first_s": times[0],
            "last_s": times[-1],
            "num_tokens": len(output.token_ids),
            "finish_reason": output.reason,
            "text": output.text,
            **output.statistics,
        }


def redirect_stdout() -> TextIO:
    """Return a stream to the benchmark; everything else that is printed goes to stderr."""
    line = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return line


def serve_questions(line: TextIO, answer: Callable[[Question], Reply]) -> None:
    """Write the ready line, then answer questions until stdin ends."""
    line.write(READY + "\n")
    for question in sys.stdin:
        line.write(json.dumps(answer(json.loads(question))) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("maker", choices=["vllm", "openvino"])
    add("model")
    add("--mode", required=True)
    add("--draft", default="")
    add("--num-speculative-tokens", type=int, default=4)
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=int, default=2048)
    add("--max-sequences", type=int, default=32)
    arguments = parser.parse_args()
    line = redirect_stdout()
    engine = importlib.import_module(f"benchmarks.spec_bench.peers.{arguments.maker}_peer").Engine(
        arguments
    )
    conversations = Conversations(engine, lambda: line.write(ANSWERED + "\n"))
    serve_questions(line, conversations.answer)


if __name__ == "__main__":
    main()
