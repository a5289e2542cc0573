"""Summarises pairs of runs: ratios with intervals, and whether the bars are met."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from cluster.records import frozen
from cluster.spec.interval import Interval

# Bar against plain decoding: for the lower bound of each stack's geometric mean, and for the upper
# bound of each of its cells.
MIN_TO_PLAIN = 0.97
CONTROL = "control"

Pair = Mapping[str, Any]
Cells = Mapping[str, Sequence[Pair]]


@frozen
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


def geometric_mean(cells: Sequence[Sequence[Pair]]) -> Interval:
    """The geometric mean of the cells' ratios, each cell counted alike."""
    return Interval.of_ratios([ratios(pairs) for pairs in cells])


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
    interval = Interval.of_strata([ratios(pairs)])
    passes = None
    if cell.stack != CONTROL:
        passes = interval.high is None or interval.high >= MIN_TO_PLAIN
    whole = Interval.of_strata([whole_ratios(pairs)]).mean
    return {"cell": cell.key, **asdict(cell), **asdict(interval), "whole": whole, "passes": passes}
