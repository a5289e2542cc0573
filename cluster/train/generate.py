"""Generates text with the target, because drafters continue such text when they serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from cluster.train.dataset import Tokens


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample a batch of continuations; temperature 0 takes the most likely token."""

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperatures: tuple[float, ...] = (0.0,)


@torch.no_grad()
def continue_prompts(
    network: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
) -> list[list[int]]:
    """One continuation per prompt, in one batch; row i uses temperature i modulo their number.

    A continuation ends with its first stop token, which is included.
    """
    width = max(len(prompt) for prompt in prompts)
    rows = torch.zeros((len(prompts), width), dtype=torch.int64)
    mask = torch.zeros((len(prompts), width), dtype=torch.int64)
    for index, prompt in enumerate(prompts):
        rows[index, width - len(prompt) :] = torch.tensor(prompt)
        mask[index, width - len(prompt) :] = 1
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    count = len(sampling.temperatures)
    temperatures = torch.tensor(
        [sampling.temperatures[index % count] for index in range(len(prompts))]
    )
    cache = DynamicCache(config=network.config)
    stopped = torch.zeros(len(prompts), dtype=torch.bool)
    columns: list[torch.Tensor] = []
    stop_ids = torch.tensor(sampling.stop_ids)
    ones = torch.ones((len(prompts), 1), dtype=torch.int64)
    for _ in range(sampling.max_new_tokens):
        logits = (
            network(
                input_ids=rows,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
        )  # [rows, vocab]
        rows = _draw(logits, temperatures, generator)[:, None]
        columns.append(rows)
        stopped |= torch.isin(rows[:, 0], stop_ids)
        if bool(stopped.all()):
            break
        mask = torch.cat([mask, ones], dim=1)
        positions = positions[:, -1:] + 1
    drawn = torch.cat(columns, dim=1).tolist()
    return [_until_stop(row, sampling.stop_ids) for row in drawn]


def generate_stream(
    network: LlamaForCausalLM,
    prompts: Iterable[Sequence[int]],
    sampling: Sampling,
    num_tokens: int,
    seed: int,
    batch_size: int = 64,
) -> Tokens:
    """Prompts with their continuations, until `num_tokens` tokens or the end of the prompts."""
    generator = torch.Generator().manual_seed(seed)
    pieces: list[Tokens] = []
    total = 0
    source = iter(prompts)
    with tqdm(total=num_tokens, unit="token") as bar:
        while total < num_tokens:
            batch = list(islice(source, batch_size))
            if not batch:
                break
            for prompt, text in zip(
                batch, continue_prompts(network, batch, sampling, generator), strict=True
            ):
                pieces.append(np.array([*prompt, *text], dtype=np.uint16))
                total += len(pieces[-1])
                bar.update(len(pieces[-1]))
    return np.concatenate(pieces)


def corpus_prompts(stream: Tokens, length: int, seed: int) -> Iterator[list[int]]:
    """Endless random pieces of a stream, all of one length so that batches need no padding."""
    generator = np.random.default_rng(seed)
    while True:
        start = int(generator.integers(len(stream) - length))
        yield stream[start : start + length].tolist()


def chat_prompts(
    stream: Tokens, assistant_id: int, end_of_text_id: int, seed: int
) -> Iterator[list[int]]:
    """Conversations of a stream, in random order, cut where the assistant's turn begins."""
    ends = np.flatnonzero(stream == end_of_text_id)
    starts = np.concatenate([[0], ends[:-1] + 1])
    for index in np.random.default_rng(seed).permutation(len(starts)):
        conversation = stream[starts[index] : ends[index]].tolist()
        if assistant_id in conversation:
            yield conversation[: conversation.index(assistant_id) + 1]


def _draw(
    logits: torch.Tensor, temperatures: torch.Tensor, generator: torch.Generator
) -> torch.Tensor:
    """Gumbel-max: adds temperature times noise to the logits, so that 0 gives the maximum."""
    exponential = torch.empty_like(logits).exponential_(generator=generator)
    noise = -torch.log(exponential.clamp(min=1e-20))
    return (logits + temperatures[:, None] * noise).argmax(dim=-1)


def _until_stop(row: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    for index, token in enumerate(row):
        if token in stop_ids:
            return row[: index + 1]
    return row
