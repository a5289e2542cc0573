"""What a step of one text has brought and verified, for counts that end where the text ends."""

from __future__ import annotations

from collections.abc import Mapping

from cluster.records import record


@record
class StepCount:
    """One step of a text.

    sources: of each token that it brought, the drafters that had proposed it, as of `TokenEvent`.
    num_nodes: draft tokens that it verified; verified: how many of these each drafter had proposed.
    decode_time_s: since the text's first verdict.
    """

    sources: tuple[tuple[str, ...], ...]
    num_nodes: int
    verified: Mapping[str, int]
    decode_time_s: float
