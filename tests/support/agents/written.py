"""A target that answers a conversation with the text that a function writes to its prompt."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerFast

from benchmarks.support.record import ROOT
from cluster.config.schema import CoordinatorConfig
from cluster.rpc.messages import WorkerDescription
from cluster.text.tokenizer import Tokenizer
from tests.support.coordinator.toy_target import PacedEngine, ToyTarget

_START, _END = "<|im_start|>", "<|im_end|>"
_ASSISTANT = f"{_START}assistant\n"
# Logits: the one token has all of the probability at any temperature that the APIs take.
_WRITTEN, _OTHER = 500.0, -500.0

Write = Callable[[str], str]


def chat_folder(folder: Path) -> Path:
    """The embedded model's tokenizer with the chat format of configs/templates."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(ROOT / "models" / "demo-target")
    tokenizer.add_special_tokens({"additional_special_tokens": [_START, _END]})
    tokenizer.eos_token = _END
    template = ROOT / "configs" / "templates" / "smollm2-tools.jinja"
    tokenizer.chat_template = template.read_text("utf-8")
    tokenizer.save_pretrained(folder)
    return folder


class WritingTarget(ToyTarget):
    """write: the answer to a prompt, as the model would write it, calls of tools included."""

    def __init__(self, folder: Path, write: Write) -> None:
        """folder: of `chat_folder`."""
        super().__init__(step_turns=1)
        self._law = _Law(Tokenizer.load(folder), write)

    def begin(self, description: WorkerDescription, settings: CoordinatorConfig) -> None:
        size = self._law.tokenizer.vocab_size
        super().begin(replace(description, vocab_size=size), settings)

    def make_engine(self) -> PacedEngine:
        return PacedEngine(self, self._law, self._law.tokenizer.vocab_size)


class _Law:
    """The logits of a context: those of the next token of what is written to its prompt."""

    def __init__(self, tokenizer: Tokenizer, write: Write) -> None:
        self.tokenizer = tokenizer
        self._write = write
        self._start = self._ids(_ASSISTANT)
        (self._end,) = self._ids(_END)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def __call__(self, context: Sequence[int]) -> np.ndarray:
        logits = np.full(self.tokenizer.vocab_size, _OTHER, np.float32)
        logits[self._next(list(context))] = _WRITTEN
        return logits

    def _next(self, context: list[int]) -> int:
        # While a prompt is read in parts, nothing is drawn from it: it may have no end yet.
        marker = self._start[0]
        if marker not in context:
            return self._end
        prompt_len = len(context) - context[::-1].index(marker) - 1 + len(self._start)
        prompt = tuple(context[:prompt_len])
        if prompt not in self._answers:
            self._answers[prompt] = self._ids(
                self._write(self.tokenizer.decode(prompt, skip_special_tokens=False))
            )
        answer = [*self._answers[prompt], self._end]
        return answer[min(max(len(context) - prompt_len, 0), len(answer) - 1)]

    def _ids(self, text: str) -> list[int]:
        return [int(each) for each in self.tokenizer.encode(text, add_special_tokens=False)]
