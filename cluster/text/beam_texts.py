"""The texts of a beam search, out of the one event that brings them all."""

from __future__ import annotations

from dataclasses import replace

from cluster.core import EMPTY_TOKENS, FinishReason, TokenEvent


def beam_event(event: TokenEvent, rank: int) -> TokenEvent:
    """The event of one text alone, 0 = the best; only that one brings the statistics.

    Where the search has found fewer texts it ends an empty one."""
    stats = event.stats if rank == 0 else None
    if rank >= len(event.beams):
        return replace(
            event,
            token_ids=EMPTY_TOKENS,
            logprobs=(),
            stats=stats,
            beams=(),
            finish_reason=FinishReason.STOP,
        )
    start = sum(end.num_tokens for end in event.beams[:rank])
    end = event.beams[rank]
    stop = start + end.num_tokens
    return replace(
        event,
        token_ids=event.token_ids[start:stop],
        logprobs=event.logprobs[start:stop],
        finish_reason=FinishReason.STOP if end.is_stopped else FinishReason.LENGTH,
        stats=stats,
        beams=(end,),
    )
