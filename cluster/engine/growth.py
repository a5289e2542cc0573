"""Growth of trees in native code over the pages that sequences hold."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Indices

from cluster.core import TokenTree
from cluster.engine.cpu.growth import Growing, Grown, GrowthRules, TreeGrower
from cluster.engine.memory.kv_cache import KVCache
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.memory.sequence import Sequence
from cluster.engine.work import Output, Work
from cluster.errors import ProtocolError

# A work's sequence with room for so many nodes; an Output where its text is missing, None where
# there is no room.
Opened = Callable[[Work, int], Sequence | Output | None]
# Is told of the tree that a sequence has behind a work's text.
Written = Callable[[Sequence, Work, TokenTree], None]


def grow(
    grower: TreeGrower,
    cache: KVCache,
    trees: Indices[Growing],
    rules: GrowthRules,
    opened: Opened,
    written: Written,
) -> list[Output | Grown | None]:
    """See `Engine.grow`; none of the requests has a pending work.

    cache: whose first layer is the model's."""
    cache.settle()
    group = cache.group_of[0]  # of all the model's layers, where they run in native code
    answers = [opened(tree.work, tree.max_slots) for tree in trees]
    pairs = zip(trees, answers, strict=True)
    ready = [(tree, each) for tree, each in pairs if isinstance(each, Sequence)]
    texts = [(each.tables[group].slots, each.cached_len) for _, each in ready]
    grown = grower.grow([tree for tree, _ in ready], texts, rules) if ready else []
    for (tree, sequence), each in zip(ready, grown, strict=True):
        written(sequence, tree.work, each.tree)
    found = iter(grown)
    return [next(found) if isinstance(each, Sequence) else each for each in answers]


class ResidentGrowth:
    """Makes room for trees on pages that their sequences own."""

    def __init__(self, page_owners: PageOwners, vocab_size: int) -> None:
        self._pages = page_owners
        self._vocab_size = vocab_size

    def opened(self, work: Work, max_slots: int) -> Sequence | Output | None:
        """See `Opened`."""
        delta, page_owners = work.delta, self._pages
        if len(delta) and not 0 <= delta.min() <= delta.max() < self._vocab_size:
            # Native code looks them up unasked.
            raise ProtocolError(
                f"request {work.request_id!r}: the delta holds token ids outside the vocabulary "
                f"0..{self._vocab_size - 1}"
            )
        sequence = page_owners.enter(work.request_id)
        have_len = page_owners.open(work, sequence)
        if have_len is not None:
            return Output(work.request_id, have_len=have_len)
        length = work.context_len + max_slots
        if not page_owners.has_room(sequence, length):
            return None
        page_owners.reserve(sequence, length)
        return sequence

    def written(self, sequence: Sequence, work: Work, tree: TokenTree) -> None:
        """See `Written`."""
        if len(work.delta):
            self._pages.commit(sequence, work.delta[sequence.cached_len - work.base_len :])
        sequence.tree = tree
