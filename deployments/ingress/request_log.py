"""One line in the log for every request: who, how much, how long; never what it said."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from cluster.core import FinishReason, SpeculationStats
from cluster.logs import UNKNOWN

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
        ttft_ms: int | str = UNKNOWN
        if times.first_token_at is not None:
            ttft_ms = round(1000.0 * (times.first_token_at - times.arrived_at))
        log.info(
            "request id=%(id)s task=%(task)s prompt_tokens=%(prompt_tokens)d "
            "output_tokens=%(output_tokens)d queue_ms=%(queue_ms)d ttft_ms=%(ttft_ms)s "
            "total_ms=%(total_ms)d finish=%(finish)s "
            "accepted_drafts=%(accepted_drafts)d/%(draft_tokens)d",
            {
                "id": self.request_id,
                "task": self.task,
                "prompt_tokens": self.num_prompt_tokens,
                "output_tokens": self.num_output_tokens,
                "queue_ms": round(1000.0 * self.queue_time_s),
                "ttft_ms": ttft_ms,
                "total_ms": round(1000.0 * (times.clock() - times.arrived_at)),
                "finish": ",".join(sorted(reasons)),
                "accepted_drafts": self.stats.num_accepted_draft_tokens,
                "draft_tokens": self.stats.num_draft_tokens,
            },
        )
