"""Ratios of two sides that were asked the same prompts, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from cluster.spec.interval import Interval
from deployments.bench.answers import TimedAnswer

# Of each answer a numerator and a denominator: a side's figure is the quotient of their sums.
Parts = Callable[[TimedAnswer], tuple[float, float]]
FIGURES: Mapping[str, Parts] = {
    "tokens/s of a request": lambda answer: (answer.num_tokens, answer.e2e_s),
    "TTFT": lambda answer: (answer.ttft_s, 1.0),
    "TPOT": lambda answer: (answer.e2e_s - answer.ttft_s, max(answer.num_tokens - 1, 0)),
}


def told(ratio: Interval) -> str:
    """A ratio for people."""
    return f"{ratio}{'' if ratio.is_telling else ': cannot tell'}"


def ratios(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> dict[str, Interval]:
    """The ratios of FIGURES over what both sides answered; those that exist.

    Each unit gives one ratio.  They differ by their prompts and by the minute in which they were
    measured, so the interval of their mean has both in it.
    """
    sides = [[each for each in answers if not each.error] for answers in (first, second)]
    answered = [{(each.unit, each.prompt) for each in side} for side in sides]
    both = answered[0] & answered[1]
    found = {}
    for name, parts in FIGURES.items():
        # Of each unit the sums of both parts, by side.
        sums = {unit: np.zeros((2, 2)) for unit, _ in sorted(both)}
        for place, side in enumerate(sides):
            for each in side:
                if (each.unit, each.prompt) in both:
                    sums[each.unit][place] += parts(each)
        own = [
            float((one[0] / one[1]) / (other[0] / other[1]))
            for one, other in sums.values()
            if min(*one, *other) > 0.0
        ]
        if own:
            found[name] = Interval.of_ratios([own])
    return found


def equal_texts(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> tuple[int, int]:
    """How many prompts have the same text on both sides, in every round, and of how many."""
    texts: dict[int, tuple[set[str], set[str]]] = {}
    for place, answers in enumerate((first, second)):
        for each in answers:
            if not each.error:
                texts.setdefault(each.prompt, (set(), set()))[place].add(each.text)
    both = [one | other for one, other in texts.values() if one and other]
    return sum(len(each) == 1 for each in both), len(both)
