"""Summarises pairs of runs: ratios with intervals, and whether the bars are met."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Bar against plain decoding: for the lower bound of each stack's geometric mean, and for the upper
# bound of each of its cells.
MIN_TO_PLAIN = 0.97
CONTROL = "control"

# Student's t at 97.5 % by degrees of freedom; beyond the table the last entry, which is larger.
_T = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160,
    2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056,
    2.052, 2.048, 2.045, 2.042,
)  # fmt: skip

Pair = Mapping[str, Any]
Cells = Mapping[str, Sequence[Pair]]


@dataclass(frozen=True, slots=True)
class Cell:
    """A stack of processes, a kind of prompts, a sampling setting and a concurrency."""

    stack: str
    kind: str
    law: str
    concurrency: int

    @property
    def key(self) -> str:
        return f"{self.stack}/{self.kind}/{self.law}/{self.concurrency}"

    @classmethod
    def of(cls, key: str) -> Cell:
        stack, kind, law, concurrency = key.split("/")
        return cls(stack, kind, law, int(concurrency))


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and its two-sided 95 % interval by Student's t; None for a single value."""

    mean: float
    low: float | None
    high: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """values: at least one."""
        return cls.of_strata([values])

    @classmethod
    def of_strata(cls, strata: Sequence[Sequence[float]]) -> Interval:
        """The mean of the strata's means; each stratum varies about a mean of its own.

        strata: at least one value each.
        """
        count = sum(map(len, strata))
        mean = math.fsum(math.fsum(values) / len(values) for values in strata) / len(strata)
        if any(len(values) == 1 for values in strata):
            return cls(mean, None, None, count)
        variance = math.fsum(_variance(values) / len(values) for values in strata)
        freedom = count - len(strata)
        half = _T[min(freedom, len(_T)) - 1] * math.sqrt(variance) / len(strata)
        return cls(mean, mean - half, mean + half, count)


def _variance(values: Sequence[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)


def geometric_mean(cells: Sequence[Sequence[Pair]]) -> Interval:
    """The geometric mean of the cells' ratios, each cell counted alike."""
    logs = Interval.of_strata([[math.log(value) for value in ratios(pairs)] for pairs in cells])
    low, high = (None if end is None else math.exp(end) for end in (logs.low, logs.high))
    return Interval(math.exp(logs.mean), low, high, logs.count)


def stacks_of(cells: Cells) -> dict[str, list[Sequence[Pair]]]:
    """The measured cells' pairs by stack."""
    stacks: dict[str, list[Sequence[Pair]]] = {}
    for key, pairs in cells.items():
        if pairs:
            stacks.setdefault(Cell.of(key).stack, []).append(pairs)
    return stacks


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """Speedup over plain decoding at full concurrency, pair by pair."""
    return [pair["ours_rate"] / pair["plain_rate"] for pair in pairs]


def whole_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Speedup of whole runs, from the first submission to the last token, pair by pair."""
    return [pair["plain_s"] / pair["ours_s"] for pair in pairs]


def summarise(cells: Cells) -> dict[str, Any]:
    """Compare every cell and every stack with plain decoding."""
    records = [_record(Cell.of(key), pairs) for key, pairs in cells.items() if pairs]
    stacks = [_stack(stack, found) for stack, found in stacks_of(cells).items()]
    failures = [record["stack"] for record in stacks if record["passes"] is False]
    failures += [record["cell"] for record in records if record["passes"] is False]
    return {"stacks": stacks, "cells": records, "failures": failures}


def _stack(stack: str, cells: Sequence[Sequence[Pair]]) -> dict[str, Any]:
    """One stack's record.  passes: None if no bar applies."""
    interval = geometric_mean(cells)
    passes = interval.low is not None and interval.low >= MIN_TO_PLAIN
    return {"stack": stack, **asdict(interval), "passes": None if stack == CONTROL else passes}


def _record(cell: Cell, pairs: Sequence[Pair]) -> dict[str, Any]:
    """One cell's record.  passes: None if no bar applies."""
    interval = Interval.of(ratios(pairs))
    passes = None
    if cell.stack != CONTROL:
        passes = interval.high is None or interval.high >= MIN_TO_PLAIN
    whole = Interval.of(whole_ratios(pairs)).mean
    return {"cell": cell.key, **asdict(cell), **asdict(interval), "whole": whole, "passes": passes}
