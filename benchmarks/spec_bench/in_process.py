"""vLLM in process: its engine is stepped directly, without HTTP and without a second process.

Run by vLLM's own interpreter, which lacks our packages: `PYTHON -m benchmarks.spec_bench.in_process
MODEL --mode MODE` answers JSON lines as in `benchmarks/peers/protocol.py`:

question  {"questions": [{"id", "category", "turns": [str]}], "max_tokens", "temperature",
           "concurrency"}
reply     {"turns": [fields of client.Turn], "refused": [id]}

Before the reply comes a line `answered` for each question.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.peers.protocol import Question, Reply, redirect_stdout, serve_questions
from benchmarks.peers.vllm_peer import add_options, create_engine

ANSWERED = "answered"


class Conversations:
    """Holds conversations, `concurrency` at a time, each turn with the answers before it."""

    def __init__(self, llm: Any, told: Any) -> None:
        """told: called after each conversation."""
        self._engine: Any = llm.llm_engine
        self._tokenizer: Any = llm.get_tokenizer()
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
                conversation = self._open.pop(output.request_id)
                turns.append(turn)
                messages = [
                    *conversation["messages"],
                    {"role": "assistant", "content": turn["text"]},
                ]
                question = conversation["question"]
                if turn["turn"] + 1 == len(question["turns"]):
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
        from vllm import SamplingParams  # type: ignore[import-not-found, unused-ignore]
        from vllm.exceptions import (  # type: ignore[import-not-found, unused-ignore]
            VLLMClientError,
        )

        messages = [
            *messages, {"role": "user", "content": question["turns"][len(messages) // 2]}
        ]  # fmt: skip
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        params = SamplingParams(
            temperature=asked["temperature"], max_tokens=asked["max_tokens"], top_p=1.0
        )
        self._count += 1
        name = str(self._count)
        submitted = time.perf_counter()
        try:
            self._engine.add_request(name, {"prompt_token_ids": ids}, params)
        except (VLLMClientError, ValueError):
            return False
        self._open[name] = {
            "question": question, "messages": messages, "submitted_s": submitted, "times": [],
        }  # fmt: skip
        return True

    def _take(self, output: Any) -> dict[str, Any] | None:
        """Note a step's output; the whole turn once it has ended."""
        now = time.perf_counter()
        conversation = self._open[output.request_id]
        found = output.outputs[0]
        if found.token_ids:
            conversation["times"] = [*conversation["times"][:1], now]
        if not output.finished:
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
            "num_tokens": len(found.token_ids),
            "finish_reason": found.finish_reason or "",
            "text": found.text,
            **_statistics(found.spec_decode_metrics),
        }


def _statistics(metrics: Any) -> dict[str, int]:
    """The fields of `client.Turn` about speculation."""
    if metrics is None:
        return {"steps": 0, "drafted": 0, "accepted": 0}
    found = metrics.to_dict()
    return {
        "steps": found["num_spec_steps"],
        "drafted": found["num_draft_tokens"],
        "accepted": found["num_accepted_draft_tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_options(parser)
    arguments = parser.parse_args()
    line = redirect_stdout()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    # The chat endpoint takes no defaults from the checkpoint either (--generation-config vllm).
    llm = create_engine(arguments, generation_config="vllm")
    serve_questions(line, Conversations(llm, lambda: line.write(ANSWERED + "\n")).answer)


if __name__ == "__main__":
    main()
