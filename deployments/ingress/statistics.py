"""Adds up the speculation statistics of the choices of one request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from cluster.core import SpeculationStats


def combined(stats: Sequence[SpeculationStats]) -> SpeculationStats:
    """The sum of several requests' statistics."""
    histogram = [0] * max((len(one.acceptance_histogram) for one in stats), default=0)
    for one in stats:
        for accepted, count in enumerate(one.acceptance_histogram):
            histogram[accepted] += count
    num_spec_steps = sum(one.num_spec_steps for one in stats)
    reasons = [one.idle_because for one in stats if one.idle_because]
    return SpeculationStats(
        num_steps=sum(one.num_steps for one in stats),
        num_spec_steps=num_spec_steps,
        num_draft_tokens=sum(one.num_draft_tokens for one in stats),
        num_accepted_draft_tokens=sum(one.num_accepted_draft_tokens for one in stats),
        acceptance_histogram=tuple(histogram),
        accepted_by_drafter=_sum(one.accepted_by_drafter for one in stats),
        shared_by_drafter=_sum(one.shared_by_drafter for one in stats),
        verified_by_drafter=_sum(one.verified_by_drafter for one in stats),
        idle_because=reasons[0] if reasons and not num_spec_steps else "",
        decode_time_s=max((one.decode_time_s for one in stats), default=0.0),
    )


def _sum(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for one in counts:
        total.update(one)
    return dict(total)
