"""Runs the items of a failed step again one at a time, so that only the faulty one is refused."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from cluster.core import VerifyItem
from cluster.worker.target_lease import TargetLease

Held = tuple[TargetLease, VerifyItem]


class Quarantine:
    """Holds items back while suspects run alone.  Used by the engine thread only.

    A suspect is a request of a step that raised.  While there is one, new items wait.  A suspect
    that gets a verdict is none any more.  A request that raises alone stays a suspect until its
    lease ends, so that its next attempts cannot fail a batch either.
    """

    def __init__(self) -> None:
        self._suspects: set[str] = set()
        self._held: deque[Held] = deque()
        self._submitted: set[str] = set()

    @property
    def holds(self) -> bool:
        """Whether items wait here."""
        return bool(self._held)

    def admit(self, lease: TargetLease, items: Sequence[VerifyItem]) -> bool:
        """Whether `items` may be submitted now; otherwise they are held until `release_next`."""
        ids = {item.request_id for item in items}
        if not self._held and self._suspects.isdisjoint(ids | self._submitted):
            self._submitted |= ids
            return True
        self._held.extend((lease, item) for item in items)
        return False

    def release_next(self) -> list[Held]:
        """What runs next, once nothing else runs: one suspect, or else all that is held."""
        self._held = deque(held for held in self._held if _is_current(*held))
        for index, (_, item) in enumerate(self._held):
            if item.request_id in self._suspects:
                released = [self._held[index]]
                del self._held[index]
                break
        else:
            released = list(self._held)
            self._held.clear()
        self._submitted |= {item.request_id for _, item in released}
        return released

    def answered(self, request_id: str) -> None:
        """An item has its verdict, so its request is no suspect."""
        self._submitted.discard(request_id)
        self._suspects.discard(request_id)

    def dropped(self, request_id: str) -> None:
        """A request's item was refused, missed or released."""
        self._submitted.discard(request_id)

    def ended(self, lease: TargetLease) -> None:
        """A lease is over: its requests never come back."""
        self._suspects = {name for name in self._suspects if not name.startswith(lease.prefix)}

    def suspect(self, failed: Sequence[Held]) -> None:
        """The step over these items raised: each will be run again, alone."""
        for lease, item in failed:
            self._suspects.add(item.request_id)
            self._submitted.discard(item.request_id)
            self._held.append((lease, item))

    def is_submitted(self, request_id: str) -> bool:
        return request_id in self._submitted

    def convict(self, request_id: str) -> None:
        """Keep the request a suspect: it raised alone."""
        self._suspects.add(request_id)
        self._submitted.discard(request_id)


def _is_current(lease: TargetLease, item: VerifyItem) -> bool:
    """Whether the item still waits for an answer: its request may have been released since."""
    return lease.pending.get(item.request_id) is item
