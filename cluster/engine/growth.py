"""Growth of trees in native code over the pages that sequences hold."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.engine.cpu.growth import Growing, Grown, GrowthRules, TreeGrower
from cluster.engine.memory.page_owners import PageOwners
from cluster.engine.work import Output, Work
from cluster.errors import ProtocolError


class ResidentGrowth:
    """Makes room for trees, lets `grower` expand them and records what it has written."""

    def __init__(
        self, page_owners: PageOwners, grower: TreeGrower, vocab_size: int, group: int
    ) -> None:
        """group: of the model's layers, which is one where they all run in native code."""
        self.grower = grower
        self._group = group
        self._pages = page_owners
        self._vocab_size = vocab_size

    def grow(self, trees: Sequence[Growing], rules: GrowthRules) -> list[Output | Grown | None]:
        """See `Engine.grow`; none of the requests has a pending work."""
        answers = [self._open(tree) for tree in trees]
        ready = [tree for tree, answer in zip(trees, answers, strict=True) if answer is True]
        sequences = [self._pages.sequences[tree.request_id] for tree in ready]
        grown: dict[str, Grown] = {}
        if ready:
            texts = [(each.tables[self._group].slots, each.cached_len) for each in sequences]
            found = self.grower.grow(ready, texts, rules)
            for tree, sequence, each in zip(ready, sequences, found, strict=True):
                if len(tree.delta):
                    start = sequence.cached_len - tree.base_len
                    self._pages.commit(sequence, tree.delta[start:])
                sequence.tree = each.tree
                grown[tree.request_id] = each
        return [
            grown[tree.request_id] if answer is True else answer or None
            for tree, answer in zip(trees, answers, strict=True)
        ]

    def _open(self, tree: Growing) -> Output | bool:
        """Make room for the tree; True if it may grow, an Output where the cache lacks its text."""
        delta = tree.delta
        if len(delta) and not 0 <= delta.min() <= delta.max() < self._vocab_size:
            # Native code looks them up unasked.
            raise ProtocolError(
                f"request {tree.request_id!r}: the delta holds token ids outside the vocabulary "
                f"0..{self._vocab_size - 1}"
            )
        page_owners = self._pages
        sequence = page_owners.enter(tree.request_id)
        work = Work(
            tree.request_id,
            tree.base_len,
            tree.delta,
            tree.tree,
            len(tree.tree),
            tree.prefix_hash,
            tree.tenant,
        )
        have_len = page_owners.open(work, sequence)
        if have_len is not None:
            return Output(tree.request_id, have_len=have_len)
        length = tree.base_len + len(tree.delta) + tree.max_slots
        if not page_owners.has_room(sequence, length):
            return False
        page_owners.reserve(sequence, length)
        return True
