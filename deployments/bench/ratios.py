"""Ratios of two sides that were asked the same prompts, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from deployments.bench.answers import Answer

_DRAWS = 2000
# Of each answer a numerator and a denominator: a side's figure is the quotient of their sums.
Parts = Callable[[Answer], tuple[float, float]]
FIGURES: Mapping[str, Parts] = {
    "tokens/s of a request": lambda answer: (answer.num_tokens, answer.e2e_s),
    "TTFT": lambda answer: (answer.ttft_s, 1.0),
    "TPOT": lambda answer: (answer.e2e_s - answer.ttft_s, max(answer.num_tokens - 1, 0)),
}


@dataclass(frozen=True, slots=True)
class Ratio:
    """The first side's figure over the second's; low, high: its 95 % interval, None for one
    prompt."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        around = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f}{around}"


def ratios(first: Sequence[Answer], second: Sequence[Answer]) -> dict[str, Ratio]:
    """The ratios of FIGURES over the prompts that both sides answered; those that exist."""
    sides = [_by_prompt(answers) for answers in (first, second)]
    prompts = sorted(sides[0].keys() & sides[1].keys())
    found = {}
    for name, parts in FIGURES.items():
        one, other = (_table(side, prompts, parts) for side in sides)
        if prompts and (min(one.sum(axis=0)) > 0.0) and min(other.sum(axis=0)) > 0.0:
            found[name] = paired_ratio(one, other)
    return found


def paired_ratio(first: np.ndarray, second: np.ndarray) -> Ratio:
    """The ratio of two quotients of sums: float64[prompts, 2], numerator and denominator.

    Prompts are drawn anew, the same ones on both sides, because how hard one is concerns both.
    """
    return resampled(len(first), lambda drawn: quotients(first, drawn) / quotients(second, drawn))


def resampled(count: int, value_of: Callable[[np.ndarray], np.ndarray]) -> Ratio:
    """The value over `count` prompts, and its interval over prompts that are drawn anew.

    value_of: float64[draws] of the places of prompts, int[draws, count].
    """
    value = float(value_of(np.arange(count)[None])[0])
    if count < 2:
        return Ratio(value)
    drawn = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    low, high = np.nanpercentile(value_of(drawn), [2.5, 97.5])
    return Ratio(value, float(low), float(high))


def quotients(table: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """One column's sum over the other's, float64[draws], of float64[prompts, 2]."""
    sums = table[drawn].sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(sums[:, 0] / sums[:, 1])


def equal_texts(first: Sequence[Answer], second: Sequence[Answer]) -> tuple[int, int]:
    """How many prompts have the same text on both sides, in every round, and of how many."""
    sides = [_by_prompt(answers) for answers in (first, second)]
    prompts = sides[0].keys() & sides[1].keys()
    texts = [{answer.text for side in sides for answer in side[prompt]} for prompt in prompts]
    return sum(len(each) == 1 for each in texts), len(texts)


def _by_prompt(answers: Sequence[Answer]) -> dict[int, list[Answer]]:
    found: dict[int, list[Answer]] = {}
    for answer in answers:
        if not answer.error:
            found.setdefault(answer.prompt, []).append(answer)
    return found


def _table(
    side: Mapping[int, Sequence[Answer]], prompts: Sequence[int], parts: Parts
) -> np.ndarray:
    """float64[prompts, 2]: the sums of both parts over the answers to each prompt."""
    rows = [np.sum([parts(answer) for answer in side[prompt]], axis=0) for prompt in prompts]
    return np.array(rows, dtype=np.float64).reshape(-1, 2)
