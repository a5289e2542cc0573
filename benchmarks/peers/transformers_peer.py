"""transformers' `generate` as a peer: `python -m benchmarks.peers.transformers_peer MODEL`.

Prompts run in groups of `concurrency`, padded on the left.  There is no prefix cache, so the time
to a group's first token includes the prefill; decode rates start at the first token and exclude it.
`generate` speculates only for one sequence, so assisted and lookup run with concurrency 1.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.peers.protocol import Question, Reply, redirect_stdout, serve_questions

_PAD = 0


class _Stamps:
    """A streamer that records when tokens arrive; its first value is the prompt."""

    def __init__(self) -> None:
        self.events: list[tuple[float, int]] = []
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """value: the prompt, then one token per sequence, or a single sequence's new tokens."""
        if self._is_prompt:
            self._is_prompt = False
            return
        before = self.events[-1][1] if self.events else 0
        self.events.append((time.perf_counter(), before + value.shape[-1]))

    def end(self) -> None:
        """Nothing to do: no tokens are held back."""


class Peer:
    def __init__(self, arguments: argparse.Namespace) -> None:
        dtype = getattr(torch, arguments.dtype)
        self._model: Any = _load(arguments.model, dtype)
        self._options: dict[str, Any] = {}
        if arguments.mode == "assisted":
            self._options = {"assistant_model": _load(arguments.draft, dtype)}
        elif arguments.mode == "lookup":
            self._options = {"prompt_lookup_num_tokens": arguments.num_speculative_tokens}

    def answer(self, question: Question) -> Reply:
        torch.manual_seed(question["seed"])
        prompts, width = question["prompts"], question["concurrency"]
        if self._options and width > 1:
            raise ValueError("generate speculates for one sequence at a time")
        answers: list[dict[str, Any]] = []
        for start in range(0, len(prompts), width):
            answers += self._generate(prompts[start : start + width], question)
        return {"answers": answers, "acceptance": self._acceptance(answers)}

    def _generate(self, group: list[list[int]], question: Question) -> list[dict[str, Any]]:
        longest = max(len(prompt) for prompt in group)
        padding = [longest - len(prompt) for prompt in group]
        ids = torch.tensor([[_PAD] * gap + p for gap, p in zip(padding, group, strict=True)])
        mask = torch.tensor([[0] * gap + [1] * (longest - gap) for gap in padding])
        law: dict[str, Any] = {"do_sample": False}
        if question["temperature"] > 0:
            law = {"do_sample": True, "temperature": question["temperature"], "top_k": 0}
        stamps = _Stamps()
        submitted = time.perf_counter()
        with torch.inference_mode():
            texts = self._model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=question["max_tokens"],
                streamer=stamps,
                pad_token_id=_PAD,
                **law,
                **self._options,
            )
        # For a batch, each put has one token of each sequence.
        events = stamps.events
        if not self._options:
            events = [(at, number) for number, (at, _) in enumerate(events, 1)]
        return [
            {"submitted": submitted, "events": events, "token_ids": text[longest:].tolist()}
            for text in texts
        ]

    def _acceptance(self, answers: list[dict[str, Any]]) -> dict[str, float] | None:
        """Acceptance, from steps that emit the accepted tokens and one more.

        `generate` does not report the number of drafted tokens.
        """
        if not self._options:
            return None
        steps = sum(len(answer["events"]) for answer in answers)
        emitted = sum(answer["events"][-1][1] for answer in answers)
        return {"steps": steps, "drafted": 0, "accepted": emitted - steps}


def _load(folder: str, dtype: torch.dtype) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    # Every system generates max_tokens tokens, so that the text does not affect the speed.
    model.generation_config.eos_token_id = None
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--mode", choices=["plain", "assisted", "lookup"], required=True)
    parser.add_argument("--draft", default="")
    parser.add_argument("--num-speculative-tokens", type=int, default=10)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    line = redirect_stdout()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    serve_questions(line, Peer(arguments).answer)


if __name__ == "__main__":
    main()
