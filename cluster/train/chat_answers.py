"""A chat model's answers to questions that it asks itself: what its drafter is distilled from.

The questions are sampled as the user's turn of the chat template, so they need no corpus and are of
the kind that the model was trained on; the answers are what it serves.  They are kept in shards, so
that an interrupted run goes on with the next one.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoConfig, PreTrainedTokenizerBase

from cluster.config.schema import EngineConfig
from cluster.engine.engine import Engine
from cluster.errors import ConfigError
from cluster.models.fingerprint import load_pretrained_tokenizer
from cluster.records import frozen
from cluster.train.generate import BatchSampling, GeneratedAnswer, write_with
from cluster.train.trainer import processes

# Stands for the user's words in the template; no template and no question contains it.
_PLACEHOLDER = "\N{SYMBOL FOR UNIT SEPARATOR}\N{SYMBOL FOR NULL}"
# Half of the answers are greedy, half are sampled as chat models usually are.
_TEMPERATURES = (0.0, 0.7, 0.0, 0.85, 0.0, 1.0)
# Shares of the probability beyond so many candidates are a few percent.
_NUM_CANDIDATES = 32
# Every so many-th answer is kept out of training.
HELD_OUT = 20
# More than chat templates add to two turns: system prompts of their own and marks.
_TEMPLATE_TOKENS = 512

Message = dict[str, str]


@frozen
class AnswerSettings:
    """How conversations are drawn.

    follow_up_share: of the conversations, how many have a second question and answer.
    taps: hidden rows that are recorded with the answers (`cluster.engine.taps`), for draft heads.
    system_prompt: stands before every question, so the model asks what belongs to that task; "" =
    the template's own.
    """

    conversations_per_shard: int = 96
    max_question_tokens: int = 192
    max_answer_tokens: int = 320
    follow_up_share: float = 0.3
    taps: tuple[int, ...] = ()
    system_prompt: str = ""


class ChatModel:
    """A chat model that talks with itself."""

    def __init__(
        self, engine: Engine, tokenizer: PreTrainedTokenizerBase, settings: AnswerSettings
    ) -> None:
        self.engine = engine
        self._settings = settings
        self._tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise ConfigError(
                "the target's tokenizer has no chat template, so it cannot ask itself questions; "
                "give a chat model"
            )
        after = self._render([_user(_PLACEHOLDER)], answers=True).split(_PLACEHOLDER)[1]
        self._stop_ids = self._stop_tokens(after)

    @classmethod
    def load(cls, source: Path, settings: AnswerSettings) -> ChatModel:
        """The model of a folder with room for the conversations of one shard."""
        config = EngineConfig(
            model=str(source),
            device=str(processes().device),
            threads=torch.get_num_threads(),
            max_running_sequences=settings.conversations_per_shard,
            max_context_len=_context_len(source, settings),
            # Nobody reads along: prompts are cut by their length, not by the clock, because other
            # rows in a step would change the last bits of hidden rows.
            max_chunk_s=3600,
            prefix_cache=not settings.taps,
        )
        return cls(Engine.load(config), load_pretrained_tokenizer(source), settings)

    def answers(self, generator: torch.Generator) -> list[GeneratedAnswer]:
        """Draw questions and answer them."""
        settings = self._settings
        prompt = settings.system_prompt
        system: list[Message] = [{"role": "system", "content": prompt}] if prompt else []
        asked = self._questions([system] * settings.conversations_per_shard, generator)
        answers, answered = self._answered(asked, generator)
        if not answers:
            raise ConfigError(
                "no question is answered: the model writes none, or its context of "
                f"{self.engine.longest_context} tokens has no room for the system prompt, a "
                "question and an answer; give another model, or a shorter --system-prompt"
            )
        num_more = round(settings.follow_up_share * len(answered))
        again = self._questions(answered[:num_more], generator)
        return answers + self._answered(again, generator)[0]

    def _questions(
        self, opened: Sequence[list[Message]], generator: torch.Generator
    ) -> list[list[Message]]:
        """Conversations with a question that the user asks next; those without one are dropped."""
        ends = [self._render([*messages, _user(_PLACEHOLDER)]) for messages in opened]
        texts = [text.split(_PLACEHOLDER)[0] for text in ends]
        sampling = BatchSampling(self._settings.max_question_tokens, self._stop_ids, (1.0,))
        drawn = self._continued(opened, texts, sampling, generator)
        asked = [(messages, self._decode(each).strip()) for messages, each in drawn]
        return [[*messages, _user(text)] for messages, text in asked if text]

    def _answered(
        self, asked: Sequence[list[Message]], generator: torch.Generator
    ) -> tuple[list[GeneratedAnswer], list[list[Message]]]:
        """The answers to conversations that end with a question, and these with the answers."""
        texts = [self._render(messages, answers=True) for messages in asked]
        settings = self._settings
        sampling = BatchSampling(
            settings.max_answer_tokens,
            self._stop_ids,
            _TEMPERATURES,
            _NUM_CANDIDATES,
            settings.taps,
        )
        drawn = self._continued(asked, texts, sampling, generator)
        answered = [
            [*messages, {"role": "assistant", "content": self._decode(each)}]
            for messages, each in drawn
        ]
        return [each for _, each in drawn], answered

    def _continued(
        self,
        conversations: Sequence[list[Message]],
        texts: Sequence[str],
        sampling: BatchSampling,
        generator: torch.Generator,
    ) -> list[tuple[list[Message], GeneratedAnswer]]:
        """What the model writes behind the texts of those conversations that leave room for it."""
        limit = self.engine.longest_context - sampling.max_new_tokens
        pairs = zip(conversations, map(self._encode, texts), strict=True)
        fitting = [(messages, ids) for messages, ids in pairs if len(ids) <= limit]
        prompts = [ids for _, ids in fitting]
        drawn = write_with(self.engine, prompts, sampling, generator)
        return [(messages, each) for (messages, _), each in zip(fitting, drawn, strict=True)]

    def _render(self, messages: list[Message], *, answers: bool = False) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answers
        )
        assert isinstance(text, str), "tokenize=False"
        return text

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _decode(self, answer: GeneratedAnswer) -> str:
        token_ids = answer.token_ids.tolist()
        if token_ids[-1] in self._stop_ids:
            token_ids = token_ids[:-1]
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=True))

    def _stop_tokens(self, after_question: str) -> tuple[int, ...]:
        """The ends of answers, and the token by which the template ends a question."""
        ends = {self._tokenizer.eos_token_id, *self.engine.eos_token_ids}
        first = self._encode(after_question.lstrip())[0]
        if first in self._tokenizer.all_special_ids:
            ends.add(first)
        return tuple(sorted(each for each in ends if each is not None))


def draw_shards(
    source: Path, folder: Path, num_tokens: int, seed: int, settings: AnswerSettings
) -> None:
    """Let the model in `source` answer until the shards in `folder` hold so many tokens.

    Several processes take turns with the shards; each adds its part of the tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model: ChatModel | None = None
    state = processes()
    wanted, total, index = num_tokens / state.num_processes, 0, state.process_index
    with tqdm(total=round(wanted), unit="token", disable=not state.is_main_process) as bar:
        while total < wanted:
            path = folder / f"answers-{index:05}.pt"
            if not path.exists():
                # Each shard has its own noise, so it does not depend on when the run was resumed.
                generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
                model = model or ChatModel.load(source, settings)
                _write(path, model.answers(generator), settings.system_prompt)
            found, answers = _read(path)
            if found != settings.system_prompt:
                raise ConfigError(
                    f"{path}: drawn with the system prompt {found!r}, not "
                    f"{settings.system_prompt!r}; choose another name or --work, or remove the "
                    "shards"
                )
            size = sum(len(each.token_ids) for each in answers)
            total += size
            bar.update(size)
            index += state.num_processes
    state.wait_for_everyone()


def read_shards(folder: Path) -> list[GeneratedAnswer]:
    """All answers in the folder, without those to questions that were asked before."""
    answers: dict[bytes, GeneratedAnswer] = {}
    for path in sorted(folder.glob("answers-*.pt")):
        for answer in _read(path)[1]:
            answers.setdefault(answer.prompt.tobytes(), answer)
    return list(answers.values())


def known_and_held_out(
    folder: Path,
    max_prompt_len: int,
    reading: Callable[[GeneratedAnswer], GeneratedAnswer] | None = None,
) -> tuple[list[GeneratedAnswer], list[GeneratedAnswer]]:
    """The answers to learn from, and those that are kept out of training.

    reading: how the drafter reads them, if not in the target's tokens.
    """
    read = map(reading, read_shards(folder)) if reading else read_shards(folder)
    answers = [each for each in read if len(each.prompt) <= max_prompt_len]
    known = [each for index, each in enumerate(answers) if index % HELD_OUT]
    if not known:
        raise ConfigError(f"{folder}: {len(answers)} answers are too few; raise --answer-tokens")
    return known, answers[::HELD_OUT]


def _read(path: Path) -> tuple[str, list[GeneratedAnswer]]:
    """The system prompt that a shard was drawn with, and its answers."""
    # Mapped, because all shards together may be larger than the memory.
    found = torch.load(path, mmap=True, weights_only=True)
    parts: list[list[Any]] = [
        [None if each is None else each.numpy() for each in row] for row in found["answers"]
    ]
    return found["system_prompt"], [GeneratedAnswer(*each) for each in parts]


def _write(path: Path, answers: Sequence[GeneratedAnswer], system_prompt: str) -> None:
    parts = ([getattr(answer, each.name) for each in fields(GeneratedAnswer)] for answer in answers)
    rows = [[None if each is None else torch.from_numpy(each) for each in row] for row in parts]
    unfinished = path.with_name(f"{path.name}.unfinished")
    torch.save({"system_prompt": system_prompt, "answers": rows}, unfinished)
    os.replace(unfinished, path)


def _context_len(source: Path, settings: AnswerSettings) -> int:
    """Room for two questions and answers, the system prompt and what the template adds, if the
    model has so much."""
    prompt = load_pretrained_tokenizer(source).encode(settings.system_prompt)
    wanted = 2 * (settings.max_question_tokens + settings.max_answer_tokens) + _TEMPLATE_TOKENS
    wanted += len(prompt)
    most = getattr(AutoConfig.from_pretrained(source), "max_position_embeddings", None)
    return min(wanted, most or wanted)


def _user(text: str) -> Message:
    return {"role": "user", "content": text}
