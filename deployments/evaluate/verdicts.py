"""What pairs of answers, with drafts and without, say of a cell: pays, slows, or cannot tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from cluster.records import frozen
from cluster.spec.interval import Interval
from deployments.report import rendered

# Of plain decoding's speed.  The whole 95 % interval must be at or above the first, or below the
# second.
PAYS_FROM, SLOWS_BELOW = 1.05, 0.98

Verdict = Literal["pays", "slows", "cannot tell"]


@dataclass(frozen=True, slots=True, order=True)
class Cell:
    """Requests that are judged together.  law: greedy or sampled."""

    task: str
    segment: str
    law: str


@frozen
class Pair:
    """The same prompts answered with drafts and without, one after the other.

    rate, plain_rate: tokens per second after the first ones.  num_tokens: of the answers with
    drafts; accepted: draft tokens of each drafter among them.  had_drafts: some were at hand,
    whether it paid to verify them or not.
    """

    rate: float
    plain_rate: float
    num_tokens: int
    accepted: Mapping[str, int]
    had_drafts: bool = True


def speedup(pairs: Sequence[Pair]) -> Interval:
    """Return the geometric mean of the pairs' ratios."""
    return Interval.of_ratios([[pair.rate / pair.plain_rate for pair in pairs]])


def verdict(found: Interval) -> Verdict:
    """Return what the interval says; a single pair says nothing."""
    if found.low is not None and found.low >= PAYS_FROM:
        return "pays"
    if found.high is not None and found.high < SLOWS_BELOW:
        return "slows"
    return "cannot tell"


def is_useless(name: str, pairs: Sequence[Pair]) -> bool:
    """True if the drafter, whose pairs are its own alone, slows its texts, or could not make them
    as fast as it takes to pay even if drafting cost nothing.

    The loop verifies so little of a bad drafter that its cost is hard to see, but what it brings is
    plain: every accepted token saves one step at most.  One that had no drafts for these prompts,
    as a grammar's where none is asked for, has shown nothing, whatever the clock said, and stays.
    """
    if not any(pair.had_drafts for pair in pairs):
        return False
    found = verdict(speedup(pairs))
    if found != "cannot tell":
        return found == "slows"
    ceiling = Interval.of_ratios(
        [[pair.num_tokens / max(pair.num_tokens - pair.accepted.get(name, 0), 1) for pair in pairs]]
    )
    return ceiling.high is not None and ceiling.high < PAYS_FROM


@frozen
class Judgement:
    """found: the speed-up by all drafters of the cell; alone: by each one alone."""

    cell: Cell
    drafts: Verdict
    found: Interval
    alone: Mapping[str, Interval]
    useless: tuple[str, ...]


def table(judgements: Sequence[Judgement]) -> str:
    """Return the judgements for people."""
    return rendered("evaluate", {"judgements": judgements})
