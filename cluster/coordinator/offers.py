"""What the drafters of a batch offer at present: re-rooted, calibrated and merged, all at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.coordinator.in_flight import InFlight
from cluster.coordinator.texts import HeldTree, Place, Text
from cluster.core import FloatArray
from cluster.records import record
from cluster.spec.acceptance import AcceptanceModel, Group, Seen
from cluster.spec.forest import Forest, Indices, Mask
from cluster.spec.held_trees import HeldTrees, MergedTrees
from cluster.spec.merge_trees import merge_trees


@record(frozen=True, slots=True, eq=False)
class Offers:
    """One tree per text of the batch, the union of its drafters' reachable ones.

    survival: float32[n], calibrated, not increasing along a path.  drafters: of each text, the one
    with the largest weight first.
    claimed: float32[k, n], what the i-th drafter of a node's text claimed for it; NaN where it
    did not propose the node.  is_pooled, is_looked_up: bool[n], a pool drafter, or a look-up among
    the residents, has proposed the node.
    """

    forest: Forest
    survival: FloatArray
    drafters: list[tuple[str, ...]]
    claimed: FloatArray
    is_pooled: Mask
    is_looked_up: Mask

    def keep(self, kept: Mask) -> Offers:
        """The nodes where kept, each with its parent."""
        return Offers(
            self.forest.keep(kept), self.survival[kept], self.drafters, self.claimed[:, kept],
            self.is_pooled[kept], self.is_looked_up[kept],
        )  # fmt: skip


@dataclass(slots=True)
class _Row:
    """The tree of one drafter for one text, which is the batch's index-th."""

    index: int
    name: str
    text: Text
    held: HeldTree


def gather(batch: Sequence[Text], acceptance: AcceptanceModel) -> Offers | None:
    """The offers for `batch`; None when no drafter has anything for any of it.

    Held trees are re-rooted at the last committed token and calibrated, once for good.
    """
    rows: list[_Row] = []
    weights: dict[tuple[str, Group], float] = {}
    for index, text in enumerate(batch):
        own: list[_Row] = []
        for name, held in text.held.items():
            if held.is_shadow:
                continue
            if held.place is not None:
                held.settle()
            if (name, text.group) not in weights:
                weights[name, text.group] = acceptance.known(name, text.group).weight()
            own.append(_Row(index, name, text, held))
        rows += sorted(own, key=lambda row: -weights[row.name, row.text.group])
    if not any(len(row.held.tree.token_ids) for row in rows):
        return None
    found = merge_trees(_held(rows, len(batch), acceptance, weights))
    drafters, trees = _note(rows, found, len(batch))
    if found.merged.num_nodes == 0:
        return None
    is_pooled = _is_proposed(found, [[not each.is_resident for each in own] for own in trees])
    is_looked_up = _is_proposed(found, [[each.is_look_up for each in own] for own in trees])
    return Offers(found.merged, found.survival, drafters, found.claims, is_pooled, is_looked_up)


def look_at(batch: Sequence[Text], max_trees: int, turn: int) -> None:
    """Remember some of the trees at hand, to be scored by the text that follows.

    Of more than max_trees another part each time, by `turn`.  Shadow trees are looked at too.
    """
    held = [(text, name, tree) for text in batch for name, tree in text.held.items()]
    stride = -(-len(held) // max_trees) if held else 1
    for text, name, tree in held[turn % stride :: stride]:
        if tree.place is not None:
            tree.settle()
        if tree.base_len <= len(text.tokens):
            text.seen.append(Seen.of(name, text.group, tree.base_len, tree.tree, tree.survival))


def _held(
    rows: Sequence[_Row],
    num_groups: int,
    acceptance: AcceptanceModel,
    weights: Mapping[tuple[str, Group], float],
) -> HeldTrees:
    """The trees as they were proposed, or as the last batch has left them."""
    calibrators = {key: acceptance.known(*key).calibrator for key in weights}
    # Merging takes losses in nats: exp(-loss) is a drafter's weight.
    losses = {key: -math.log(weight) for key, weight in weights.items()}
    return HeldTrees(
        [row.held.tree for row in rows],
        [row.held.survival for row in rows],
        [row.held.calibrated for row in rows],
        [calibrators[row.name, row.text.group] for row in rows],
        [row.text.tokens.since(row.held.base_len) for row in rows],
        [row.index for row in rows],
        [losses[row.name, row.text.group] for row in rows],
        num_groups,
    )


def _note(
    rows: Sequence[_Row], found: MergedTrees, num_texts: int
) -> tuple[list[tuple[str, ...]], list[list[HeldTree]]]:
    """Leave with each text what has become of its trees; returns the drafters of each that have
    nodes, and their trees."""
    drafters: list[tuple[str, ...]] = [()] * num_texts
    trees: list[list[HeldTree]] = [[] for _ in range(num_texts)]
    bounds = found.left.starts.tolist()
    for index, (row, root) in enumerate(zip(rows, found.roots.tolist(), strict=True)):
        held, text = row.held, row.text
        start, stop = bounds[index], bounds[index + 1]
        if root == -2:
            del text.held[row.name]
        elif root >= 0:
            held.place = Place(found.left, found.claimed, found.calibrated, index)
            held.base_len = len(text.tokens)
        elif held.calibrated is None:
            held.calibrated = found.calibrated[start:stop]
        if start < stop:
            drafters[row.index] += (row.name,)
            trees[row.index].append(held)
    return drafters, trees


def _is_proposed(found: MergedTrees, is_meant: list[list[bool]]) -> Mask:
    """Nodes that one of the drafters meant has proposed; is_meant: of each text's drafters."""
    flags = [flag for own in is_meant for flag in own]
    if all(flags) or not any(flags):
        return np.full(found.merged.num_nodes, bool(flags and flags[0]))
    meant = np.zeros((len(found.claims), len(is_meant)), dtype=np.bool_)
    for text, own in enumerate(is_meant):
        meant[: len(own), text] = own
    claims = found.claims
    return np.asarray(((claims == claims) & meant[:, found.merged.owners]).any(axis=0))


def plain_items(texts: Sequence[Text]) -> list[InFlight]:
    """Items without drafts."""
    return [InFlight(len(text.tokens)) for text in texts]


def in_flight_of(texts: Sequence[Text], offers: Offers | None, nodes: Indices) -> list[InFlight]:
    """An item for each text, with those of its nodes that were chosen."""
    if offers is None or len(nodes) == 0:
        return plain_items(texts)
    is_chosen = np.zeros(offers.forest.num_nodes, dtype=np.bool_)
    is_chosen[nodes] = True
    chosen = offers.keep(is_chosen)
    forest, claimed = chosen.forest, chosen.claimed
    bounds = forest.starts.tolist()
    found: list[InFlight] = []
    rows = zip(texts, forest.split(), chosen.drafters, bounds, bounds[1:], strict=False)
    for text, tree, drafters, start, stop in rows:
        if start == stop:
            found.append(InFlight(len(text.tokens)))
            continue
        own = claimed[:, start:stop]
        if len(drafters) == 1:
            num_proposed: tuple[int, ...] = (stop - start,)
        else:
            num_proposed = tuple((~np.isnan(own[: len(drafters)])).sum(axis=1).tolist())
        found.append(InFlight(len(text.tokens), tree, drafters, num_proposed, own))
    return found
