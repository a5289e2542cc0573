"""Measures acceptance lengths of a drafter's greedy chains by replay of the target's text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from cluster.train.generate import Sampling, continue_prompts

CHAIN_LEN = 4


@dataclass(frozen=True, slots=True)
class Transcript:
    """A prompt and the target's continuation."""

    prompt: tuple[int, ...]
    text: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def decode_transcripts(
    target: LlamaForCausalLM,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    batch_size: int = 32,
) -> list[Transcript]:
    """The target's greedy text for each prompt; prompts of similar length share a batch."""
    sampling = Sampling(max_new_tokens, stop_ids)
    generator = torch.Generator().manual_seed(0)
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    texts: dict[int, Transcript] = {}
    for first in range(0, len(order), batch_size):
        chosen = order[first : first + batch_size]
        batch = [prompts[index] for index in chosen]
        drawn = continue_prompts(target, batch, sampling, generator)
        for index, text in zip(chosen, drawn, strict=True):
            texts[index] = Transcript(tuple(prompts[index]), tuple(text))
    return [texts[index] for index in range(len(prompts))]


@torch.no_grad()
def greedy_matches(drafter: LlamaForCausalLM, transcript: Transcript) -> NDArray[np.bool_]:
    """Whether the drafter's most likely token after each true prefix is the target's: bool[text].

    A greedy chain that was accepted so far equals the target's text, so its next token follows a
    true prefix: one forward pass over the whole text gives every chain from every start.
    """
    ids = torch.tensor([[*transcript.prompt, *transcript.text]], device=drafter.device)
    logits = drafter(input_ids=ids[:, :-1], use_cache=False).logits[0]
    drafted = logits[len(transcript.prompt) - 1 :].argmax(dim=-1).cpu()
    return np.asarray((drafted == torch.tensor(transcript.text)).numpy(), dtype=np.bool_)


def mean_acceptance_len(matches: NDArray[np.bool_], chain_len: int = CHAIN_LEN) -> float:
    """Tokens per verify step, including the target's own, for one chain after the other.

    Counts only steps whose whole chain fits into the text; nan if there is none.
    """
    position = num_steps = 0
    while position + chain_len < len(matches):
        window = matches[position : position + chain_len]
        accepted = chain_len if window.all() else int(window.argmin())
        position += accepted + 1
        num_steps += 1
    return position / num_steps if num_steps else float("nan")


def acceptance_lens(
    drafter: LlamaForCausalLM, transcripts: Sequence[Transcript]
) -> NDArray[np.float64]:
    """float64[transcripts]: the mean acceptance length along each text."""
    return np.array([mean_acceptance_len(greedy_matches(drafter, item)) for item in transcripts])


def bootstrap_interval(
    values: NDArray[np.float64], seed: int = 0, num_resamples: int = 10_000
) -> Interval:
    """The mean of the values that are not nan, and the range of 95 % of resampled means."""
    defined = values[~np.isnan(values)]
    generator = np.random.default_rng(seed)
    picks = generator.integers(len(defined), size=(num_resamples, len(defined)))
    low, high = np.percentile(defined[picks].mean(axis=1), [2.5, 97.5])
    return Interval(float(defined.mean()), float(low), float(high))
