"""What learns is fenced from what serves: where it fails, only what it would have learned is lost.

Statistics, calibration, accounts and planning see numbers that others sent.  Should one of them
fail all the same, the round goes on without it, and the link that it happened on is not lost.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from types import TracebackType

from cluster import metrics
from cluster.plan.samples import Samples

log = logging.getLogger(__name__)


class Fence:
    """Counts and logs what fails within its sections."""

    def __init__(self, recorder: Samples) -> None:
        self._recorder = recorder
        self._num_failures: dict[str, int] = {}

    def section(self, part: str) -> AbstractContextManager[None]:
        """A context that ends where something fails in it, and lets what follows go on.

        part: names it in the metric.  It may be entered any number of times.
        """
        return _Section(self, part)

    def failed(self, part: str, error: Exception) -> None:
        """Note a failure; each doubling of their number is logged, or every round would be."""
        count = self._num_failures[part] = self._num_failures.get(part, 0) + 1
        self._recorder.add(metrics.BOOKKEEPING_FAULTS, part=part)
        if count & (count - 1) == 0:
            log.error(
                "bookkeeping failed part=%s times=%d; rounds go on without it",
                part, count, exc_info=error,
            )  # fmt: skip


class _Section(AbstractContextManager[None]):
    """One for many rounds: it holds nothing of the block that it guards."""

    __slots__ = ("_fence", "_part")

    def __init__(self, fence: Fence, part: str) -> None:
        self._fence = fence
        self._part = part

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self._fence.failed(self._part, error)
        return True
