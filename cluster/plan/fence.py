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


class Fence(AbstractContextManager[Any]):
    """A context that suppresses, counts and logs an exception of its block.

    It may be entered any number of times, because it keeps no state of the block that it guards.
    """

    def __init__(self, recorder: Recorder, part: str) -> None:
        """part: its name in the metric."""
        self._recorder, self._part = recorder, part
        self._num_failures = 0

    def __exit__(self, *raised: Any) -> bool:
        """Only each doubling of the count is logged: every round may fail."""
        _, error, _ = raised
        if not isinstance(error, Exception):
            return False
        self._num_failures = count = self._num_failures + 1
        self._recorder.add(metrics.BOOKKEEPING_FAULTS, part=self._part)
        if count & (count - 1) == 0:
            log.error(
                "bookkeeping failed part=%s times=%d; rounds go on without it",
                self._part,
                count,
                exc_info=error,
            )
        return True
