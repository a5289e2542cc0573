"""Contains a step that raises: its texts run again one by one, and one that raises alone ends."""

from __future__ import annotations

import logging

from cluster.errors import WorkerError
from cluster.worker.target_stream import TargetStreams
from cluster.worker.text_keeper import TextKeeper
from cluster.worker.texts import TextTable
from cluster.worker.verifier import Verifier

log = logging.getLogger(__name__)

# If so many requests raise alone with no good step in between, the engine itself is broken.
_MAX_RAISED_ALONE = 3


class Containment:
    """Handles steps that raise.  Belongs to the engine thread.

    broken: the error after which the engine cannot be used any more, None = it can.
    """

    def __init__(
        self, verifier: Verifier, keeper: TextKeeper, texts: TextTable, streams: TargetStreams
    ) -> None:
        self.broken: WorkerError | None = None
        self._verifier = verifier
        self._keeper = keeper
        self._texts = texts
        self._streams = streams
        self._raised_alone: set[str] = set()  # names of texts, since the last good step

    def went_well(self) -> None:
        """Note that a step did not raise."""
        self._raised_alone.clear()

    def contain(self, error: Exception) -> None:
        """Handle a step that raised: its texts run again one by one, without drafts, and a text
        that raises alone is refused.

        The engine is broken if several texts raise alone with no good step in between, or if the
        error is a WorkerError (its device or a rank is lost).
        """
        if isinstance(error, WorkerError):
            self.break_off(WorkerError(f"the target's engine is broken: {type(error).__name__}"))
            return
        failed = [text for text in self._texts.values() if text.in_flight is not None]
        try:
            # Their state is dropped, because the step may have left it inconsistent.
            self._verifier.release([text.id for text in failed])
        except Exception:
            log.exception("state could not be freed")
            self.break_off(WorkerError("the target's engine cannot free its state"))
            return
        for text in failed:
            text.in_flight, text.suspect = None, True
            text.held.clear()
        if len(failed) > 1:
            return
        self._raised_alone |= {text.id for text in failed}
        if len(self._raised_alone) >= _MAX_RAISED_ALONE:
            self.break_off(WorkerError(f"the target's engine is broken: {type(error).__name__}"))
            return
        message = f"the target failed on this step ({type(error).__name__}); try again"
        for text in failed:
            self._keeper.convict(text, WorkerError(message))

    def break_off(self, error: WorkerError) -> None:
        """End every stream with `error`, because the engine cannot be used any more."""
        self.broken = error
        for stream in self._streams:
            stream.fail(error)
