"""Where a text goes: like to like, as long as the targets are about equally busy."""

from __future__ import annotations

import bisect
from collections import OrderedDict
from collections.abc import Iterable

from cluster.coordinator.session import Seat, Session
from cluster.coordinator.targets import TargetSeat

# Pages that are remembered of one target: of a million tokens, in about 10 MB.
_MAX_PAGES = 65_536


class Placement:
    """Chooses targets, and remembers which pages each of them has been given to compute.

    A page is known by the hash of everything up to its end and by whose text it is.  The memory is
    a guess: other coordinators place texts too, and a target drops pages as it likes.
    """

    def __init__(self, page_len: int, max_pages: int = _MAX_PAGES) -> None:
        """page_len: tokens of a page of the targets' prefix cache."""
        self._page_len = page_len
        self._max_pages = max_pages
        self._pages: dict[str, OrderedDict[int, None]] = {}  # by target, used last at the end

    def choose(self, session: Session, seats: Iterable[TargetSeat]) -> TargetSeat | None:
        """Return the best of the targets with room, None without one.

        It is the one that holds the longest prefix, if that is half of the text or more: with less,
        as a chat's opening is, too little is saved to crowd one target.  Then the one that runs
        fewest texts of other groups, then the one with most free seats.  A target with less than
        half of the free seats of another is left out, so that no preference piles up texts.  The
        one that has failed the text is taken only if there is no other.
        """
        free = [seat for seat in seats if seat.has_room()]
        free = [seat for seat in free if seat.id != session.shunned_target] or free
        most = max((seat.num_free for seat in free), default=0)
        return max(
            (seat for seat in free if 2 * seat.num_free >= most),
            key=lambda seat: (
                self._worthwhile(seat.id, session),
                -_share_of_others(seat, session),
                seat.num_free,
            ),
            default=None,
        )

    def remember(self, seat: Seat, session: Session) -> None:
        """Note that the target computes the text as far as it goes."""
        pages = self._pages.setdefault(seat.id, OrderedDict())
        # The first page last: so a page is forgotten only after all that continue it.
        for number in range(len(session.tokens) // self._page_len, 0, -1):
            key = self._key(session, number)
            pages[key] = None
            pages.move_to_end(key)
        while len(pages) > min(seat.load.pages_total or self._max_pages, self._max_pages):
            pages.popitem(last=False)

    def forget(self, target_id: str) -> None:
        """Note that the target is lost; an unknown one is no error."""
        self._pages.pop(target_id, None)

    def num_held(self, target_id: str, session: Session) -> int:
        """Return how many tokens at the beginning of the text the target should hold."""
        pages = self._pages.get(target_id, OrderedDict())
        # Whoever holds a page holds those before it.
        return self._page_len * bisect.bisect_left(
            range(1, len(session.tokens) // self._page_len + 1),
            True,
            key=lambda number: self._key(session, number) not in pages,
        )

    def _worthwhile(self, target_id: str, session: Session) -> int:
        num_held = self.num_held(target_id, session)
        return num_held if 2 * num_held >= len(session.tokens) else 0

    def _key(self, session: Session, num_pages: int) -> int:
        request = session.request
        end_hash = session.tokens.hash_at(num_pages * self._page_len)
        return hash((request.tenant, request.adapter, end_hash))


def _share_of_others(seat: TargetSeat, session: Session) -> float:
    """Return which part of this coordinator's texts there is of other groups than `session`."""
    num_others = sum(each.text.group != session.text.group for each in seat.sessions.values())
    return num_others / len(seat.sessions) if num_others else 0.0
