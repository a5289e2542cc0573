"""What waits for a client who reads slowly: many small pieces become few large ones.

A request is decoded at the target's pace whatever its client does, so a slow reader holds no place
and no KV pages.  Here it costs four bytes per token that it has not read, and what was asked for
beside the tokens; not an object per step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from cluster.core import TokenArray, TokenEvent

# A client who reads at the pace of a model has one or two pieces waiting.
MAX_PIECES = 64


def compacted_tokens(pieces: list[TokenArray]) -> list[TokenArray]:
    """The same tokens in one piece, if there are more than MAX_PIECES."""
    return pieces if len(pieces) <= MAX_PIECES else [np.concatenate(pieces)]


def compacted_events(events: list[TokenEvent]) -> list[TokenEvent]:
    """The same news in three events, if there are more than MAX_PIECES.

    The first and the last stay as they are: they alone say more than which tokens came.
    """
    if len(events) <= MAX_PIECES:
        return events
    return [events[0], _merged(events[1:-1]), events[-1]]


def _merged(events: Sequence[TokenEvent]) -> TokenEvent:
    return dataclasses.replace(
        events[0],
        token_ids=np.concatenate([event.token_ids for event in events]),
        logprobs=tuple(one for event in events for one in event.logprobs),
        draft_sources=tuple(one for event in events for one in event.draft_sources),
    )
