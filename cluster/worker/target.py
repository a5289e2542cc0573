"""The target's process body: one engine thread, many links.

The thread waits on a condition, never on a clock.  All items that have arrived run as one step
with a chunk of every long prefill; a link's state lives as long as the link.  Residents have their
turn after each step, when its verdicts have left.  The items of a step that raised run again one by
one, and only one that raises alone is refused.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from cluster.core import VerifyItem
from cluster.draft.inside import StepRows
from cluster.errors import WorkerError
from cluster.messages import (
    CacheMiss,
    InHand,
    Refusal,
    StepReport,
    VerdictFrame,
    VerifyFrame,
    WorkerDescription,
)
from cluster.rpc.duplex import run_until_first_ends
from cluster.rpc.link import Link
from cluster.worker.quarantine import Quarantine
from cluster.worker.residents import Answered, Residents
from cluster.worker.target_lease import Answers, Leases, TargetLease

log = logging.getLogger(__name__)

# While long prefills are pending, a step that answered a batch waits so long for the next batch:
# else that one would queue behind a whole chunk, and decoding would run at half its pace.
_NEXT_BATCH_GRACE_S = 0.004
# How often a link hears what is in hand, while anything is: often enough that a coordinator which
# misses some of it in a row may call it silence, and far too seldom to cost anything.
_IN_HAND_INTERVAL_S = 1.0
# Requests that raise alone with no good step in between: then it is the engine that is broken.
_MAX_RAISED_ALONE = 3


class StepVerifier(Protocol):
    """What the worker needs of `cluster.worker.verifier.Verifier`."""

    @property
    def has_pending(self) -> bool: ...
    def submit(self, items: Sequence[VerifyItem]) -> Sequence[Refusal | CacheMiss]: ...
    @property
    def last_rows(self) -> Sequence[StepRows]: ...
    def step(self) -> VerdictFrame: ...
    def release(self, request_ids: Iterable[str]) -> None: ...
    def idle_report(self) -> StepReport: ...


class TargetWorker:
    """Serves verification over any number of links; `start` it first, `stop` it last."""

    def __init__(
        self,
        verifier: StepVerifier,
        description: WorkerDescription,
        residents: Residents | None = None,
    ) -> None:
        self._verifier = verifier
        self._residents = residents or Residents(())
        self._description = description
        self._condition = threading.Condition()
        self._inbound: deque[tuple[TargetLease, VerifyFrame | None]] = deque()
        self.leases = Leases()
        self._is_stopping = False
        self._broken: WorkerError | None = None
        self._raised_alone: set[str] = set()  # requests, since the last step that went well
        self._owners: dict[str, TargetLease] = {}  # every known request id, engine thread only
        self._quarantine = Quarantine()  # engine thread only
        self._grace_s = 0.0  # how long to wait for a frame although there is something to do
        self._thread = threading.Thread(target=self._run, name="target-engine", daemon=True)

    def start(self) -> None:
        """Start the engine thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the engine thread after the step it is in.  Open links get no more answers."""
        with self._condition:
            self._is_stopping = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()

    def describe(self) -> WorkerDescription:
        return self._description

    @property
    def healthy(self) -> bool:
        """False when the engine cannot be used any more; then this process must be replaced."""
        return self._broken is None and self._thread.is_alive()

    async def serve(self, link: Link[VerdictFrame, VerifyFrame]) -> None:
        """Serve one link until it ends; then free everything it has created.

        Raises WorkerError when the engine is broken, so that the peer goes elsewhere at once.
        """
        if self._broken is not None:
            raise self._broken
        lease = self.leases.open()
        try:
            await run_until_first_ends(
                self._read_all(lease, link), lease.send_forever(link), self._say_in_hand(lease)
            )
        except WorkerError as error:
            if self._broken is not None:
                raise
            log.info("target link broke: %s", error.message)
        finally:
            self.leases.close(lease)
            self._arrived(lease, None)
            await link.close()

    async def _read_all(self, lease: TargetLease, link: Link[VerdictFrame, VerifyFrame]) -> None:
        async for frame in link:
            self._arrived(lease, frame)

    async def _say_in_hand(self, lease: TargetLease) -> None:
        """Tell the peer, for ever, what it has not been answered yet; from the event loop, for the
        engine thread may be in a long step."""
        while True:
            await asyncio.sleep(_IN_HAND_INTERVAL_S)
            with self._condition:
                frames = [frame for owner, frame in self._inbound if owner is lease and frame]
            # A copy is one operation to Python: the engine thread may go on meanwhile.
            items = list(lease.pending.copy().values())
            in_hand = [InHand(lease.outside(item.request_id), item.generation) for item in items]
            for item in (item for frame in frames for item in frame.items):
                in_hand.append(InHand(item.request_id, item.generation))
            if in_hand:
                lease.post(VerdictFrame(in_hand=tuple(in_hand)))

    def _arrived(self, lease: TargetLease, frame: VerifyFrame | None) -> None:
        """Hand a frame to the engine thread; None ends the lease."""
        with self._condition:
            self._inbound.append((lease, frame))
            self._condition.notify()

    # Everything below runs in the engine thread.

    def _run(self) -> None:
        try:
            while (arrivals := self._wait()) is not None:
                for lease, frame in arrivals:
                    if frame is None:
                        self._end(lease)
                    else:
                        self._take(lease, frame)
                if self._quarantine.holds and not self._verifier.has_pending:
                    for lease, item in self._quarantine.release_next():
                        self._submit(lease, [item])
                if self._verifier.has_pending:
                    self._step()
        except BaseException as error:
            log.critical("engine thread ended", exc_info=True)
            self._break(WorkerError(f"the target's engine thread ended: {type(error).__name__}"))
            raise

    def _wait(self) -> list[tuple[TargetLease, VerifyFrame | None]] | None:
        """What has arrived, after waiting for it where there is nothing else to do; None = stop."""
        with self._condition:
            has_work = self._verifier.has_pending or self._quarantine.holds
            timeout_s = self._grace_s if has_work else None
            self._condition.wait_for(lambda: self._inbound or self._is_stopping, timeout_s)
            if self._is_stopping:
                return None
            arrivals = self._next_arrivals()
        self._grace_s = 0.0
        return arrivals

    def _next_arrivals(self) -> list[tuple[TargetLease, VerifyFrame | None]]:
        """What is there, up to a frame that is apart from those before it.

        That one is taken after the step that they make, whatever is pending then: a long prefill
        does not hold it up.
        """
        arrivals: list[tuple[TargetLease, VerifyFrame | None]] = []
        while self._inbound:
            _, frame = self._inbound[0]
            if arrivals and frame is not None and frame.is_apart:
                break
            arrivals.append(self._inbound.popleft())
        return arrivals

    def _end(self, lease: TargetLease) -> None:
        self._forget(lease, list(lease.request_ids))
        self._quarantine.ended(lease)

    def _forget(self, lease: TargetLease, request_ids: Iterable[str]) -> None:
        known = [request_id for request_id in request_ids if request_id in lease.request_ids]
        self._verifier.release(known)
        self._residents.release(known)
        for request_id in known:
            lease.request_ids.discard(request_id)
            lease.pending.pop(request_id, None)
            self._owners.pop(request_id, None)
            self._quarantine.dropped(request_id)

    def _take(self, lease: TargetLease, frame: VerifyFrame) -> None:
        if self._broken is not None:
            return  # the lease is being ended
        self._forget(lease, [lease.prefix + request_id for request_id in frame.released])
        items = [item for item in map(lease.inside, frame.items) if not lease.is_doubled(item)]
        if not items:
            if not self._verifier.has_pending:
                report, drafts = self._verifier.idle_report(), self._residents.idle_report()
                lease.post(VerdictFrame(report=report, drafts=drafts))
            return
        for item in items:
            lease.request_ids.add(item.request_id)
            lease.pending[item.request_id] = item
            self._owners[item.request_id] = lease
        if self._quarantine.admit(lease, items):
            self._submit(lease, items)

    def _submit(self, lease: TargetLease, items: Sequence[VerifyItem]) -> None:
        try:
            known_at_once = self._verifier.submit(items)
        except Exception as error:
            log.exception("items were not taken count=%d", len(items))
            self._refuse_all(lease, items, error)
            return
        if known_at_once:
            answers = Answers()
            for answer in known_at_once:
                self._answer(lease, answer, answers)
            lease.post(answers.frame(None))

    def _answer(self, lease: TargetLease, answer: Refusal | CacheMiss, answers: Answers) -> None:
        pending = lease.pending.get(answer.request_id)
        # A stale item's refusal leaves the newer one pending.
        if pending is not None and pending.generation == answer.generation:
            del lease.pending[answer.request_id]
            self._quarantine.dropped(answer.request_id)
        outside = replace(answer, request_id=lease.outside(answer.request_id))
        if isinstance(outside, Refusal):
            answers.refusals.append(outside)
        else:
            answers.misses.append(outside)

    def _step(self) -> None:
        try:
            frame = self._verifier.step()
        except Exception as error:
            log.exception("engine step failed")
            self._contain(error)
            return
        self._raised_alone.clear()
        if frame.verdicts:
            self._grace_s = _NEXT_BATCH_GRACE_S
        answered = self._post(frame)
        # Only now: no token waits for drafts.
        rows = self._verifier.last_rows
        for lease, drafts in self._residents.draft(answered, frame.report, rows):
            lease.post(VerdictFrame(drafts=drafts))

    def _post(self, frame: VerdictFrame) -> list[Answered]:
        """Send every lease its own answers; those still owed some get the report alone.
        Returns the items that have a verdict."""
        answered: list[Answered] = []
        answers = {lease: Answers() for lease in set(self._owners.values()) if lease.pending}
        for verdict in frame.verdicts:
            lease = self._owners[verdict.request_id]
            item = lease.pending.pop(verdict.request_id, None)
            if item is not None:
                answered.append((lease, item, verdict))
            self._quarantine.answered(verdict.request_id)
            outside = replace(verdict, request_id=lease.outside(verdict.request_id))
            answers.setdefault(lease, Answers()).verdicts.append(outside)
        others: tuple[Refusal | CacheMiss, ...] = (*frame.misses, *frame.refusals)
        for answer in others:
            lease = self._owners[answer.request_id]
            self._answer(lease, answer, answers.setdefault(lease, Answers()))
        for lease, mine in answers.items():
            lease.post(mine.frame(frame.report))
        return answered

    def _contain(self, error: Exception) -> None:
        """A step raised: run its items again one by one; refuse one that raises alone.

        The engine is past use when several requests raise with no good step in between, or when it
        says so itself by a WorkerError (its device or a rank is lost).
        """
        if isinstance(error, WorkerError):
            self._break(WorkerError(f"the target's engine is broken: {type(error).__name__}"))
            return
        failed = [
            (lease, item)
            for lease in set(self._owners.values())
            for item in lease.pending.values()
            if self._quarantine.is_submitted(item.request_id)
        ]
        if len(failed) > 1:
            # Their state is dropped: its condition is unknown.  Tokens that are missing then are
            # asked for again like any others.
            if self._has_freed([item.request_id for _, item in failed]):
                self._quarantine.suspect(failed)
            return
        self._raised_alone |= {item.request_id for _, item in failed}
        if len(self._raised_alone) >= _MAX_RAISED_ALONE:
            self._break(WorkerError(f"the target's engine is broken: {type(error).__name__}"))
            return
        for lease, item in failed:
            self._refuse_all(lease, [item], error)
            self._quarantine.convict(item.request_id)

    def _has_freed(self, request_ids: Sequence[str]) -> bool:
        """Drop the verifier's state of these requests; False when that breaks the engine."""
        try:
            self._verifier.release(request_ids)
        except Exception:
            log.exception("state could not be freed")
            self._break(WorkerError("the target's engine cannot free its state"))
            return False
        return True

    def _refuse_all(
        self, lease: TargetLease, items: Sequence[VerifyItem], error: Exception
    ) -> None:
        """Answer `items` with worker_error and drop their state, whose condition is unknown."""
        answers = Answers()
        message = f"the target failed on this step ({type(error).__name__}); try again"
        for item in items:
            request_id = lease.outside(item.request_id)
            answers.refusals.append(Refusal(request_id, item.generation, WorkerError.code, message))
        request_ids = [item.request_id for item in items]
        if self._has_freed(request_ids):
            self._forget(lease, request_ids)
        lease.post(answers.frame(None))

    def _break(self, error: WorkerError) -> None:
        """The engine is past use: end every link, so that the sequences go on elsewhere."""
        self._broken = error
        for lease in list(self.leases):
            lease.fail(error)
