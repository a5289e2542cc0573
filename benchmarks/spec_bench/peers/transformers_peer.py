"""transformers' `generate` as a peer, in process (`benchmarks.spec_bench.peers.engines`).

All that waits is one batch, padded on the left; what comes meanwhile waits for the next one.  It
has no prefix cache.  It speculates for one sequence at a time, so the others wait.
"""

from __future__ import annotations

import argparse
import os
import queue
import threading
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.spec_bench.peers.engines import Output, Question

_PAD = 0
# Of the queue: a batch has ended.
_END = None


@dataclass(slots=True)
class _Open:
    """A request.  steps: of the model in which it got tokens."""

    name: str
    prompt: list[int]
    asked: Question
    to_the_end: bool
    token_ids: list[int] = field(default_factory=list)
    steps: int = 0


class _Stream:
    """A streamer: what `generate` puts into it, behind the prompt, comes out of a queue."""

    def __init__(self) -> None:
        self.found: queue.Queue[torch.Tensor | BaseException | None] = queue.Queue()
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """value: the prompt, then one token per sequence, or a single sequence's new tokens."""
        if not self._is_prompt:
            self.found.put(value)
        self._is_prompt = False

    def end(self) -> None:
        """Nothing to do: no tokens are held back."""


class Engine:
    """See `benchmarks.spec_bench.peers.engines.Engine`."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
        dtype = getattr(torch, arguments.dtype)
        self._tokenizer: Any = AutoTokenizer.from_pretrained(arguments.model)
        self._model: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=dtype).eval()
        self._options: dict[str, Any] = {}
        if arguments.mode == "assisted":
            draft: Any = AutoModelForCausalLM.from_pretrained(arguments.draft, dtype=dtype)
            self._options = {"assistant_model": draft.eval()}
        elif arguments.mode == "lookup":
            self._options = {"prompt_lookup_num_tokens": arguments.num_speculative_tokens}
        self._eos = self._tokenizer.eos_token_id
        self._waiting: list[_Open] = []
        self._batch: list[_Open] = []
        self._stream = _Stream()

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def add(self, name: str, prompt: list[int], asked: Question, *, to_the_end: bool) -> bool:
        self._waiting.append(_Open(name, prompt, asked, to_the_end))
        return True

    def step(self) -> list[Output]:
        if not self._batch:
            width = 1 if self._options else len(self._waiting)
            self._batch, self._waiting = self._waiting[:width], self._waiting[width:]
            self._stream = _Stream()
            threading.Thread(target=self._generate, args=(list(self._batch), self._stream)).start()
        found = self._stream.found.get()
        if isinstance(found, BaseException):
            raise RuntimeError(str(found)) from found
        # A single sequence may get several tokens at once, else there is one for each.
        rows = [[]] * len(self._batch) if found is _END else found.reshape(len(self._batch), -1)
        outputs = [
            self._output(each, list(map(int, row)), is_last=found is _END)
            for each, row in zip(self._batch, rows, strict=True)
        ]
        if found is _END:
            self._batch = []
        return [each for each in outputs if each is not None]

    def _output(self, request: _Open, tokens: list[int], *, is_last: bool) -> Output | None:
        """What a request's client is told: its new tokens, or that its batch has ended."""
        ids = request.token_ids
        if tokens and not (ids and ids[-1] == self._eos and not request.to_the_end):
            ids += tokens
            request.steps += 1
        elif not is_last:
            return None
        statistics = {"steps": 0, "drafted": 0, "accepted": 0}
        if self._options:  # it does not say how many it has drafted
            statistics |= {"steps": request.steps, "accepted": len(ids) - request.steps}
        text = self._tokenizer.decode(ids, skip_special_tokens=True) if is_last else ""
        return Output(request.name, list(ids), "ended" if is_last else "", text, statistics)

    def _generate(self, batch: list[_Open], stream: _Stream) -> None:
        longest = max(len(each.prompt) for each in batch)
        padding = [longest - len(each.prompt) for each in batch]
        both = list(zip(padding, batch, strict=True))
        first = batch[0]
        law: dict[str, Any] = {"do_sample": False}
        if first.asked["temperature"] > 0:
            law = {"do_sample": True, "temperature": first.asked["temperature"], "top_k": 0}
        try:
            with torch.inference_mode():
                self._model.generate(
                    torch.tensor([[_PAD] * gap + each.prompt for gap, each in both]),
                    attention_mask=torch.tensor(
                        [[0] * gap + [1] * len(each.prompt) for gap, each in both]
                    ),
                    max_new_tokens=first.asked["max_tokens"],
                    eos_token_id=None if first.to_the_end else self._eos,
                    streamer=stream,
                    pad_token_id=_PAD,
                    **law,
                    **self._options,
                )
            stream.found.put(_END)
        except (RuntimeError, ValueError) as error:
            stream.found.put(error)
