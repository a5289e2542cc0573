"""Generates text with the target, because drafters continue such text when they serve."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm
from transformers import DynamicCache, LlamaForCausalLM

from cluster.core import token_array
from cluster.engine.engine import Engine
from cluster.engine.taps import Taps
from cluster.engine.work import Work
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
    device = network.device
    for _ in range(sampling.max_new_tokens):
        logits = (
            network(
                input_ids=rows.to(device),
                attention_mask=mask.to(device),
                position_ids=positions.to(device),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            .logits[:, -1]
            .float()
            .cpu()
        )  # [rows, vocab], where the noise is drawn: it is the same for every device
        rows = _draw(logits, temperatures, generator)[:, None]
        columns.append(rows)
        stopped |= torch.isin(rows[:, 0], stop_ids)
        if bool(stopped.all()):
            break
        mask = torch.cat([mask, ones], dim=1)
        positions = positions[:, -1:] + 1
    drawn = torch.cat(columns, dim=1).tolist()
    return [_until_stop(row, sampling.stop_ids) for row in drawn]


@dataclass(frozen=True, slots=True, eq=False)
class Continuation:
    """What a model wrote, and its most probable tokens at each place.

    candidates: int32[n, k], best first.  log_probs: float16[n, k], at temperature 1.
    states: bfloat16[prompt + n - 1, taps, hidden], the hidden rows of all tokens but the last;
    None where no taps were asked for.
    """

    token_ids: list[int]
    candidates: NDArray[np.int32]
    log_probs: NDArray[np.float16]
    states: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class _Writing:
    """A prompt's continuation so far.  length: tokens that the engine holds."""

    temperature: float
    length: int
    states: torch.Tensor | None = None
    token_ids: list[int] = field(default_factory=list)
    candidates: list[NDArray[np.int32]] = field(default_factory=list)
    log_probs: list[NDArray[np.float16]] = field(default_factory=list)


def write_with(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    generator: torch.Generator,
    num_candidates: int,
    taps: Sequence[int] = (),
) -> list[Continuation]:
    """One continuation per prompt, as `continue_prompts`, by the engine that serves the model.

    All prompts run at once; the engine shares what they have in common.  taps: hidden rows to
    record (`cluster.engine.taps`); the engine must be without a prefix cache then, because rows
    that it finds there have none.
    """
    temperatures = sampling.temperatures
    writing = {
        str(index): _Writing(temperatures[index % len(temperatures)], len(prompt))
        for index, prompt in enumerate(prompts)
    }
    for name, prompt in zip(writing, prompts, strict=True):
        engine.submit(Work(name, 0, token_array(prompt)))
    while engine.has_pending:
        outputs = engine.step(taps)
        _record(engine.last_step.taps, writing, prompts, sampling.max_new_tokens)
        for output in outputs:
            if output.error is not None:
                raise output.error
        # Preemption: the engine asks for the text again.
        for output in outputs:
            if output.have_len is not None:
                each = writing[output.request_id]
                text = [*prompts[int(output.request_id)], *each.token_ids]
                each.length = len(text)
                delta = token_array(text[output.have_len :])
                engine.submit(Work(output.request_id, output.have_len, delta))
        drawn = [output for output in outputs if output.logits is not None]
        if not drawn:
            continue
        logits = torch.cat([output.logits for output in drawn if output.logits is not None]).cpu()
        best = logits.topk(num_candidates, dim=-1)
        log_probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).half().numpy()
        ids = best.indices.int().numpy()
        chosen = [writing[output.request_id] for output in drawn]
        tokens = _draw_laws(logits, [each.temperature for each in chosen], generator)
        for row, (output, each, token) in enumerate(zip(drawn, chosen, tokens, strict=True)):
            each.token_ids.append(token)
            each.candidates.append(ids[row])
            each.log_probs.append(log_probs[row])
            if token in sampling.stop_ids or len(each.token_ids) == sampling.max_new_tokens:
                engine.release(output.request_id)
                continue
            engine.submit(Work(output.request_id, each.length, token_array([token])))
            each.length += 1
    return [
        Continuation(
            each.token_ids,
            np.stack(each.candidates),
            np.stack(each.log_probs),
            None if each.states is None else each.states[: each.length].clone(),
        )
        for each in writing.values()
    ]


def _record(
    taps: Taps | None,
    writing: Mapping[str, _Writing],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
) -> None:
    """Put a step's rows where their positions say."""
    if taps is None:
        return
    for rows in taps.sequences:
        each = writing[rows.request_id]
        found = taps.rows[rows.start : rows.stop]
        if each.states is None:
            size = len(prompts[int(rows.request_id)]) + max_new_tokens
            each.states = torch.zeros(size, *found.shape[1:], dtype=torch.bfloat16)
        each.states[rows.first_position : rows.first_position + len(found)] = found


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


def _draw_laws(
    logits: torch.Tensor, temperatures: Sequence[float], generator: torch.Generator
) -> list[int]:
    """One token a row: the most likely one at temperature 0, else by inversion of the law.

    Noise for every token of the vocabulary, as in `_draw`, would take longer than all else.
    """
    tokens = logits.argmax(dim=-1)
    uniform = torch.rand(len(logits), 1, generator=generator)
    heat = torch.tensor(temperatures)
    sampled = (heat > 0.0).nonzero().flatten()
    if len(sampled):
        probs = torch.softmax(logits[sampled] / heat[sampled, None], dim=-1)
        sums = probs.cumsum(dim=-1)
        places = torch.searchsorted(sums, uniform[sampled] * sums[:, -1:], right=True)[:, 0]
        tokens[sampled] = places.clamp(max=logits.shape[1] - 1)
    drawn: list[int] = tokens.tolist()
    return drawn


def _until_stop(row: list[int], stop_ids: tuple[int, ...]) -> list[int]:
    for index, token in enumerate(row):
        if token in stop_ids:
            return row[: index + 1]
    return row
