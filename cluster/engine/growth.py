"""Pages for trees that grow in native code."""

from __future__ import annotations

from cluster.core import TokenTree
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.sequence import Sequence
from cluster.engine.work import Output, Work


class ResidentGrowth:
    """See `TreeTexts`: trees on pages that their sequences own."""

    def __init__(self, page_owners: PageOwners) -> None:
        self._pages = page_owners

    def opened(self, work: Work, max_slots: int) -> Sequence | Output | None:
        """See `TreeTexts`."""
        sequence = self._pages.enter(work.request_id)
        have_len = self._pages.open(work, sequence)
        if have_len is not None:
            return Output(work.request_id, have_len=have_len)
        length = work.context_len + max_slots
        if not self._pages.has_room(sequence, length):
            return None
        self._pages.reserve(sequence, length)
        return sequence

    def written(self, sequence: Sequence, work: Work, tree: TokenTree) -> None:
        """See `TreeTexts`."""
        if len(work.delta):
            self._pages.commit(sequence, work.delta[sequence.cached_len - work.base_len :])
        sequence.tree = tree
