"""One line in the log for every request: who, how much, how long; never what it said."""

from __future__ import annotations

import logging
import time

from cluster.core import FinishReason
from cluster.logs import UNKNOWN
from deployments.ingress.generation import Generation

log = logging.getLogger(__name__)


def write_line(generation: Generation) -> None:
    """Say in the log that a request has ended; nothing of one that was refused before its
    samples were made."""
    choices, tokens, stats = generation.choices, generation.tokens, generation.stats
    if not choices:
        return
    reasons = {
        choice.finish_reason.value
        if choice.finish_reason
        else generation.error_code or FinishReason.CANCELLED.value
        for choice in choices
    }
    arrived_at, first_token_at = generation.arrived_at, generation.first_token_at
    ttft_ms: int | str = UNKNOWN
    if first_token_at is not None:
        ttft_ms = round(1000.0 * (first_token_at - arrived_at))
    log.info(
        "request id=%(id)s task=%(task)s prompt_tokens=%(prompt_tokens)d "
        "output_tokens=%(output_tokens)d queue_ms=%(queue_ms)d ttft_ms=%(ttft_ms)s "
        "total_ms=%(total_ms)d finish=%(finish)s "
        "accepted_drafts=%(accepted_drafts)d/%(draft_tokens)d",
        {
            "id": generation.id,
            "task": generation.spec.task,
            "prompt_tokens": tokens["prompt"],
            "output_tokens": tokens["output"],
            "queue_ms": round(1000.0 * max(choice.queue_time_s for choice in choices)),
            "ttft_ms": ttft_ms,
            "total_ms": round(1000.0 * (time.monotonic() - arrived_at)),
            "finish": ",".join(sorted(reasons)),
            "accepted_drafts": stats.num_accepted_draft_tokens,
            "draft_tokens": stats.num_draft_tokens,
        },
    )
