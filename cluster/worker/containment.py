"""What a step that raised costs: its texts run again one by one, and the guilty one is ended."""

from __future__ import annotations

import logging

from cluster.errors import WorkerError
from cluster.worker.step_verifier import StepVerifier
from cluster.worker.target_stream import TargetStreams
from cluster.worker.text_keeper import TextKeeper

log = logging.getLogger(__name__)

# Requests that raise alone with no good step in between: then it is the engine that is broken.
_MAX_RAISED_ALONE = 3


class Containment:
    """Belongs to the engine thread.  broken: why the engine cannot be used any more."""

    def __init__(self, verifier: StepVerifier, keeper: TextKeeper, streams: TargetStreams) -> None:
        self.broken: WorkerError | None = None
        self._verifier = verifier
        self._keeper = keeper
        self._streams = streams
        self._raised_alone: set[str] = set()  # texts, since the last step that went well

    def went_well(self) -> None:
        """A step did not raise."""
        self._raised_alone.clear()

    def contain(self, error: Exception) -> None:
        """A step raised: its texts run again one by one and plain; one that raises alone is
        refused.

        The engine is past use when several texts raise with no good step in between, or when it
        says so itself by a WorkerError (its device or a rank is lost).
        """
        if isinstance(error, WorkerError):
            self.break_off(WorkerError(f"the target's engine is broken: {type(error).__name__}"))
            return
        failed = [text for text in self._keeper if text.in_flight is not None]
        try:
            # Their state is dropped: its condition is unknown.
            self._verifier.release([text.id for text in failed])
        except Exception:
            log.exception("state could not be freed")
            self.break_off(WorkerError("the target's engine cannot free its state"))
            return
        for text in failed:
            text.in_flight, text.held_len, text.suspect = None, 0, True
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
        """The engine cannot be used any more: every stream ends with that."""
        self.broken = error
        for stream in self._streams:
            stream.fail(error)
