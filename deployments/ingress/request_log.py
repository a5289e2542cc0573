"""One line in the log for every request: who, how much, how long; never what it said."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core import FinishReason, SpeculationStats

log = logging.getLogger(__name__)


@dataclass(slots=True)
class RequestTimes:
    """When a request came and when its first tokens left; seconds of `clock`."""

    clock: Callable[[], float] = time.monotonic
    arrived_at: float = field(init=False)
    first_token_at: float | None = None

    def __post_init__(self) -> None:
        self.arrived_at = self.clock()

    def note_tokens(self) -> None:
        if self.first_token_at is None:
            self.first_token_at = self.clock()


@dataclass(frozen=True, slots=True)
class RequestLine:
    """What the log says of a request that has ended.

    queue_time_s: the longest of its samples.  finish_reasons: of the samples, None = the client
    went before the end.  error_code: of the error that ended it, else "".
    """

    request_id: str
    task: str
    num_prompt_tokens: int
    num_output_tokens: int
    queue_time_s: float
    times: RequestTimes
    finish_reasons: Sequence[FinishReason | None]
    error_code: str
    stats: SpeculationStats

    def write(self) -> None:
        reasons = {
            reason.value if reason else self.error_code or FinishReason.CANCELLED.value
            for reason in self.finish_reasons
        }
        times = self.times
        ttft = "-"
        if times.first_token_at is not None:
            ttft = f"{1000.0 * (times.first_token_at - times.arrived_at):.0f}"
        log.info(
            "request id=%s task=%s prompt_tokens=%d output_tokens=%d queue_ms=%.0f ttft_ms=%s "
            "total_ms=%.0f finish=%s accepted_drafts=%d/%d",
            self.request_id,
            self.task,
            self.num_prompt_tokens,
            self.num_output_tokens,
            1000.0 * self.queue_time_s,
            ttft,
            1000.0 * (times.clock() - times.arrived_at),
            ",".join(sorted(reasons)),
            self.stats.num_accepted_draft_tokens,
            self.stats.num_draft_tokens,
        )
