"""Keeps failures of the learning code away from serving.

Statistics, calibration, accounts and planning compute with numbers that other processes sent.  If
one of them raises, its result is lost, but the round goes on and the link stays open.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Any

from cluster import metrics
from cluster.metrics.recorder import Recorder

log = logging.getLogger(__name__)


class Fence:
    """Counts and logs the exceptions that are raised within its sections."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._num_failures: dict[str, int] = {}

    def section(self, part: str) -> AbstractContextManager[Any]:
        """Return a context that suppresses, counts and logs an exception of its block.

        part: its name in the metric.  The context may be entered any number of times.
        """
        return _Section(self, part)

    def failed(self, part: str, error: Exception) -> None:
        """Count a failure.  Only each doubling of the count is logged: every round may fail."""
        count = self._num_failures[part] = self._num_failures.get(part, 0) + 1
        self._recorder.add(metrics.BOOKKEEPING_FAULTS, part=part)
        if count & (count - 1) == 0:
            log.error(
                "bookkeeping failed part=%s times=%d; rounds go on without it",
                part,
                count,
                exc_info=error,
            )


class _Section(AbstractContextManager[Any]):
    """A section that many rounds reuse, because it keeps no state of the block that it guards."""

    def __init__(self, fence: Fence, part: str) -> None:
        self._fence = fence
        self._part = part

    def __exit__(self, *raised: Any) -> bool:
        _, error, _ = raised
        if not isinstance(error, Exception):
            return False
        self._fence.failed(self._part, error)
        return True
