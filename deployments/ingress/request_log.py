"""One line in the log for every request: who, how much, how long; never what it said."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from cluster.core import FinishReason, SpeculationStats
from cluster.logs import UNKNOWN
from cluster.metrics.told import Tokens
from deployments.ingress.choice import Choice

log = logging.getLogger(__name__)


def write_line(
    request_id: str,
    task: str,
    texts: Sequence[Choice],
    tokens: Tokens,
    stats: SpeculationStats,
    arrived_at: float,
    first_token_at: float | None,
    error_code: str,
) -> None:
    """Say in the log that a request has ended.  error_code: of the error that ended it, else "".

    arrived_at, first_token_at: in seconds of `time.monotonic`."""
    reasons = {
        text.finish_reason.value
        if text.finish_reason
        else error_code or FinishReason.CANCELLED.value
        for text in texts
    }
    ttft_ms: int | str = UNKNOWN
    if first_token_at is not None:
        ttft_ms = round(1000.0 * (first_token_at - arrived_at))
    log.info(
        "request id=%(id)s task=%(task)s prompt_tokens=%(prompt_tokens)d "
        "output_tokens=%(output_tokens)d queue_ms=%(queue_ms)d ttft_ms=%(ttft_ms)s "
        "total_ms=%(total_ms)d finish=%(finish)s "
        "accepted_drafts=%(accepted_drafts)d/%(draft_tokens)d",
        {
            "id": request_id,
            "task": task,
            "prompt_tokens": tokens["prompt"],
            "output_tokens": tokens["output"],
            "queue_ms": round(1000.0 * max(text.queue_time_s for text in texts)),
            "ttft_ms": ttft_ms,
            "total_ms": round(1000.0 * (time.monotonic() - arrived_at)),
            "finish": ",".join(sorted(reasons)),
            "accepted_drafts": stats.num_accepted_draft_tokens,
            "draft_tokens": stats.num_draft_tokens,
        },
    )
