"""One system's answers, and the rates and latencies computed from their time stamps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Answer:
    """One prompt's output.

    submitted_s: time of submission.  events: (time, tokens so far), one per arrival of tokens.
    Times are seconds of one clock.
    """

    submitted_s: float
    events: tuple[tuple[float, int], ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> Answer:
        events = tuple((float(time), int(count)) for time, count in data["events"])
        return cls(float(data["submitted"]), events, tuple(data["token_ids"]))

    @property
    def ttft_s(self) -> float:
        return self.events[0][0] - self.submitted_s

    @property
    def decode_s(self) -> float:
        """Seconds from the first tokens to the last."""
        return self.events[-1][0] - self.events[0][0]

    @property
    def decode_tokens(self) -> int:
        """Tokens after the first event: those that were decoded in decode_s."""
        return self.events[-1][1] - self.events[0][1]


@dataclass(frozen=True, slots=True)
class Acceptance:
    """steps: verify steps with drafts, over all sequences.  drafted, accepted: tokens."""

    steps: float
    drafted: float
    accepted: float

    @property
    def mean_length(self) -> float:
        return 1 + self.accepted / self.steps if self.steps else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one turn of one system.  acceptance: None if nothing was drafted."""

    answers: tuple[Answer, ...]
    acceptance: Acceptance | None = None


def rate_at_level(answers: Sequence[Answer], level: int, *, from_submission: bool) -> float:
    """Tokens per second while `level` answers were running at once; 0 if that never happened.

    Excludes the end of a run, where fewer and fewer answers run at a time.  from_submission: an
    answer runs from its submission on; otherwise from its first tokens, which are not counted then.
    The tokens of an event are spread over the time since the previous event.
    """
    spans: list[tuple[float, float, int]] = []  # (from, to, tokens)
    for answer in answers:
        events = answer.events
        if from_submission:
            events = ((answer.submitted_s, 0), *events)
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
