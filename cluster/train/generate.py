"""Continues prompts by a target's engine, and notes its laws and its hidden rows meanwhile."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from cluster.core import token_array
from cluster.engine.engine import Engine
from cluster.engine.taps import Taps
from cluster.engine.work import Work
from cluster.records import frozen, record


@frozen
class BatchSampling:
    """How to sample a batch of continuations, and what is noted of them.

    Prompt i is continued at temperature i modulo their number; 0 takes the most likely token.
    num_candidates: most probable tokens at each place.  taps: hidden rows (`cluster.engine.taps`).
    """

    max_new_tokens: int
    stop_ids: tuple[int, ...]
    temperatures: tuple[float, ...]
    num_candidates: int = 1
    taps: tuple[int, ...] = ()


@record
class GeneratedAnswer:
    """A prompt, what a model wrote behind it, and its most probable tokens at each place.

    candidates: int32[answer, k], best first.  log_probs: float16[answer, k], at temperature 1.
    states: int16[prompt + answer - 1, taps, hidden], the bits of bfloat16 hidden rows of all tokens
    but the last; None where no taps were asked for.  rejected: int32[m], the places where a step's
    drafts ended because the target drew another token; None where it was not served.
    """

    prompt: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    candidates: NDArray[np.int32]
    log_probs: NDArray[np.float16]
    states: NDArray[np.int16] | None = None
    rejected: NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class _Writing:
    """A prompt with its continuation so far.

    noise: a number for each token to come.  states: [rows, taps, hidden], by position."""

    text: list[int]
    temperature: float
    noise: torch.Tensor
    states: torch.Tensor | None = None
    candidates: list[NDArray[np.int32]] = field(default_factory=list)
    log_probs: list[NDArray[np.float16]] = field(default_factory=list)


def write_with(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: BatchSampling,
    generator: torch.Generator,
) -> list[GeneratedAnswer]:
    """One continuation per prompt, by the engine that serves the model, up to the first stop token,
    which is included.

    All prompts run at once; the engine shares what they have in common.  A prompt's noise is its
    own, however the engine divides prompts into steps, which is by the clock.  An engine whose rows
    are tapped must be without a prefix cache, because rows that it finds there have none.
    """
    noise = torch.rand(len(prompts), sampling.max_new_tokens, generator=generator)
    given = zip(prompts, itertools.cycle(sampling.temperatures), noise, strict=False)
    writing = {
        str(index): _Writing([*prompt], temperature, numbers)
        for index, (prompt, temperature, numbers) in enumerate(given)
    }
    for name, each in writing.items():
        engine.submit(Work(name, 0, token_array(each.text)))
    while engine.has_pending:
        outputs = engine.step(sampling.taps)
        _record(engine.last_step.taps, writing)
        for output in outputs:
            if output.error is not None:
                raise output.error
        # Preemption: the engine asks for the text again.
        for output in outputs:
            if output.have_len is not None:
                missing = writing[output.request_id].text[output.have_len :]
                engine.submit(Work(output.request_id, output.have_len, token_array(missing)))
        drawn = [output for output in outputs if output.logits is not None]
        if not drawn:
            continue
        logits = torch.cat([output.logits for output in drawn if output.logits is not None]).cpu()
        best = logits.topk(sampling.num_candidates, dim=-1)
        log_probs = (best.values - logits.logsumexp(dim=-1, keepdim=True)).half().numpy()
        ids = best.indices.int().numpy()
        chosen = [writing[output.request_id] for output in drawn]
        uniform = torch.stack([each.noise[len(each.candidates)] for each in chosen])
        tokens = _draw_laws(logits, [each.temperature for each in chosen], uniform)
        for row, (output, each, token) in enumerate(zip(drawn, chosen, tokens, strict=True)):
            each.candidates.append(ids[row])
            each.log_probs.append(log_probs[row])
            if token in sampling.stop_ids or len(each.candidates) == sampling.max_new_tokens:
                engine.release(output.request_id)
            else:
                engine.submit(Work(output.request_id, len(each.text), token_array([token])))
            each.text.append(token)
    return [
        GeneratedAnswer(
            np.array(prompt, np.int32),
            np.array(each.text[len(prompt) :], np.int32),
            np.stack(each.candidates),
            np.stack(each.log_probs),
            None
            if each.states is None
            else each.states[: len(each.text) - 1].clone().view(torch.int16).numpy(),
        )
        for prompt, each in zip(prompts, writing.values(), strict=True)
    ]


def _record(taps: Taps | None, writing: Mapping[str, _Writing]) -> None:
    """Put a step's rows where their positions say."""
    if taps is None:
        return
    for rows in taps.sequences:
        each = writing[rows.request_id]
        found = taps.rows[rows.start : rows.stop]
        if each.states is None:
            size = len(each.text) + len(each.noise)
            each.states = torch.zeros(size, *found.shape[1:], dtype=torch.bfloat16)
        each.states[rows.first_position : rows.first_position + len(found)] = found


def _draw_laws(
    logits: torch.Tensor, temperatures: Sequence[float], uniform: torch.Tensor
) -> list[int]:
    """One token a row: the most likely one at temperature 0, else by inversion of the law, at a
    number of [0, 1) for each row.

    Noise for every token of the vocabulary would take longer than all else.
    """
    tokens = logits.argmax(dim=-1)
    heat = torch.tensor(temperatures)
    sampled = (heat > 0.0).nonzero().flatten()
    if len(sampled):
        probs = torch.softmax(logits[sampled] / heat[sampled, None], dim=-1)
        sums = probs.cumsum(dim=-1)
        places = torch.searchsorted(sums, uniform[sampled, None] * sums[:, -1:], right=True)[:, 0]
        tokens[sampled] = places.clamp(max=logits.shape[1] - 1)
    return tokens.tolist()
