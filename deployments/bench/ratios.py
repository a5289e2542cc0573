"""Ratios of two sides that were asked the same prompts, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
    sides = [_by_prompt(answers) for answers in (first, second)]
    units: dict[int, list[tuple[int, int]]] = {}
    for key in sorted(sides[0].keys() & sides[1].keys()):
        units.setdefault(key[0], []).append(key)
    found = {}
    for name, parts in FIGURES.items():
        tables = [[_sums(side, keys, parts) for side in sides] for keys in units.values()]
        own = [
            (one[0] / one[1]) / (other[0] / other[1])
            for one, other in tables
            if min(*one, *other) > 0.0
        ]
        if own:
            found[name] = Interval.of_ratios([own])
    return found


def equal_texts(first: Sequence[TimedAnswer], second: Sequence[TimedAnswer]) -> tuple[int, int]:
    """How many prompts have the same text on both sides, in every round, and of how many."""
    texts_of: list[dict[int, set[str]]] = [{}, {}]
    for side, answers in zip(texts_of, (first, second), strict=True):
        for answer in answers:
            if not answer.error:
                side.setdefault(answer.prompt, set()).add(answer.text)
    one, other = texts_of
    texts = [one[prompt] | other[prompt] for prompt in one.keys() & other.keys()]
    return sum(len(each) == 1 for each in texts), len(texts)


def _by_prompt(answers: Sequence[TimedAnswer]) -> dict[tuple[int, int], list[TimedAnswer]]:
    """By unit and prompt."""
    found: dict[tuple[int, int], list[TimedAnswer]] = {}
    for answer in answers:
        if not answer.error:
            found.setdefault((answer.unit, answer.prompt), []).append(answer)
    return found


def _sums(
    side: Mapping[tuple[int, int], Sequence[TimedAnswer]],
    keys: Sequence[tuple[int, int]],
    parts: Parts,
) -> tuple[float, float]:
    """Both parts over the answers of one unit."""
    found = [parts(answer) for key in keys for answer in side[key]]
    return sum(each[0] for each in found), sum(each[1] for each in found)
