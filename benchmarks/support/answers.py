"""One system's answers, and the rates and latencies computed from their time stamps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cluster.records import frozen


@frozen
class Law:
    """A sampling setting: its name in tables, and the temperature (0 = greedy)."""

    name: str
    temperature: float

    @classmethod
    def parse(cls, text: str) -> Law:
        """ "greedy", or "t" and a temperature, e.g. "t0.8"; ValueError otherwise."""
        if text == "greedy":
            return cls(text, 0.0)
        if not text.startswith("t"):
            raise ValueError(f"law {text!r}: expected greedy or a temperature like t0.8")
        return cls(text, float(text[1:]))


@frozen
class Answer:
    """One prompt's output.

    submitted_s: time of submission.  events: (time, tokens so far), one per arrival of tokens.
    Times are seconds of one clock.
    """

    submitted_s: float
    events: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]


@frozen
class Acceptance:
    """steps: verify steps with drafts, over all sequences.  accepted: tokens."""

    steps: float
    accepted: float

    @property
    def mean_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 1.0


@frozen
class Result:
    """The result of one turn of one system.  acceptance: None if nothing was drafted."""

    answers: tuple[Answer, ...]
    acceptance: Acceptance | None = None


def rate_at_level(answers: Sequence[Answer], level: int) -> float:
    """Tokens per second while `level` answers were running at once; 0 if that never happened.

    Excludes the end of a run, where fewer and fewer answers run at a time.  An answer runs from its
    submission on.  The tokens of an event are spread over the time since the previous event.
    """
    spans: list[tuple[float, float, int]] = []  # (from, to, tokens)
    for answer in answers:
        events = ((answer.submitted_s, 0), *answer.events)
        for (sooner, few), (later, many) in pairwise(events):
            if later > sooner:
                spans.append((sooner, later, many - few))
    edges = sorted({time for sooner, later, _ in spans for time in (sooner, later)})
    begins, ends, counts = np.array(spans).reshape(-1, 3).T
    total_s = total = 0.0
    for sooner, later in pairwise(edges):
        is_on = (begins <= sooner) & (ends >= later)
        if is_on.sum() >= level:
            total_s += later - sooner
            total += float((counts[is_on] / (ends - begins)[is_on]).sum()) * (later - sooner)
    return total / total_s if total_s else 0.0
