"""The effect of speculation on one text, as far as the text goes; and on several together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from cluster.core import SpeculationStats
from cluster.requests.fields import StepCount
from cluster.requests.idle import IdleReason


@dataclass(slots=True)
class TextStatistics:
    """Counts of one text, in the definitions of `SpeculationStats`.

    A draft counts as accepted where it is a token of the text: not behind a stop token, a stop
    string or a limit.  The steps are those that brought some of the text.
    """

    _num_steps: int = 0
    _num_drafted: int = 0
    _histogram: Counter[int] = field(default_factory=Counter)  # steps with drafts, by accepted
    _accepted: Counter[str] = field(default_factory=Counter)
    _shared: Counter[str] = field(default_factory=Counter)
    _verified: Counter[str] = field(default_factory=Counter)
    _decode_time_s: float = 0.0

    def take(self, steps: Sequence[StepCount], num_tokens: int) -> None:
        """Count steps, of whose tokens the first num_tokens belong to the text."""
        for step in steps:
            if step.sources and not num_tokens:
                return
            told = step.sources[:num_tokens]
            num_tokens -= len(told)
            self._num_steps += 1
            self._decode_time_s = step.decode_time_s
            if step.num_nodes:
                accepted = [names for names in told if names]
                self._num_drafted += step.num_nodes
                self._verified.update(step.verified)
                self._accepted.update(names[0] for names in accepted)
                self._shared.update(name for names in accepted for name in names[1:])
                self._histogram[len(accepted)] += 1

    def of(self, whole: SpeculationStats) -> SpeculationStats:
        """Return what it has counted of a text that is `whole` at its coordinator; that one where
        it was given no steps."""
        return self.snapshot(whole.idle_because) if self._num_steps else whole

    def snapshot(self, idle_because: str) -> SpeculationStats:
        """idle_because: why it had no step with drafts, if it had none; "" = it had some later."""
        num_spec_steps, longest = self._histogram.total(), max(self._histogram, default=-1)
        return SpeculationStats(
            num_steps=self._num_steps,
            num_spec_steps=num_spec_steps,
            num_draft_tokens=self._num_drafted,
            num_accepted_draft_tokens=self._accepted.total(),
            acceptance_histogram=tuple(self._histogram[count] for count in range(longest + 1)),
            accepted_by_drafter=dict(self._accepted),
            shared_by_drafter=dict(self._shared),
            verified_by_drafter=dict(self._verified),
            idle_because="" if num_spec_steps else idle_because or IdleReason.TOO_SHORT,
            decode_time_s=self._decode_time_s,
        )


def combined(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sum of several requests' statistics."""
    sums: dict[str, Any] = {}
    for name in (each.name for each in fields(SpeculationStats)):
        values = [getattr(one, name) for one in stats]
        if name.startswith("num_"):
            sums[name] = sum(values)
        elif name.endswith("_by_drafter"):
            sums[name] = dict(sum(map(Counter, values), Counter()))
    reasons = [one.idle_because for one in stats if one.idle_because]
    return SpeculationStats(
        **sums,
        acceptance_histogram=tuple(
            map(sum, zip_longest(*(one.acceptance_histogram for one in stats), fillvalue=0))
        ),
        idle_because=reasons[0] if reasons and not sums["num_spec_steps"] else "",
        decode_time_s=max((one.decode_time_s for one in stats), default=0.0),
    )
