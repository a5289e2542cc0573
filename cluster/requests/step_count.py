"""What a step of one text has brought and verified, for counts that end where the text ends."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.records import record


@record(frozen=True, slots=True, eq=False)
class StepCount:
    """One step of a text.

    num_tokens: that it brought.  sources: of those that were accepted drafts, in their order, the
    drafters that had proposed it; the one that it counts for goes first.  num_nodes: draft tokens
    that it verified; verified: how many of these each drafter had proposed.
    decode_time_s: since the text's first verdict.
    """

    num_tokens: int
    sources: tuple[tuple[str, ...], ...]
    num_nodes: int
    verified: Mapping[str, int]
    decode_time_s: float
