"""Adds up the speculation statistics of the choices of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.core import SpeculationStats


def combined(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sum of several requests' statistics."""
    histogram = [0] * max((len(one.acceptance_histogram) for one in stats), default=0)
    for one in stats:
        for accepted, count in enumerate(one.acceptance_histogram):
            histogram[accepted] += count
    by_drafter: Counter[str] = Counter()
    verified: Counter[str] = Counter()
    for one in stats:
        by_drafter.update(one.accepted_by_drafter)
        verified.update(one.verified_by_drafter)
    num_spec_steps = sum(one.num_spec_steps for one in stats)
    reasons = [one.idle_because for one in stats if one.idle_because]
    return SpeculationStats(
        num_steps=sum(one.num_steps for one in stats),
        num_spec_steps=num_spec_steps,
        num_draft_tokens=sum(one.num_draft_tokens for one in stats),
        num_accepted_draft_tokens=sum(one.num_accepted_draft_tokens for one in stats),
        acceptance_histogram=tuple(histogram),
        accepted_by_drafter=dict(by_drafter),
        verified_by_drafter=dict(verified),
        idle_because=reasons[0] if reasons and not num_spec_steps else "",
    )
