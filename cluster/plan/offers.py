"""The trees that a batch's drafters offer at present, re-rooted, calibrated and merged together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray
from cluster.plan.in_flight import PLAIN, InFlight
from cluster.plan.texts import POOL, HeldTree, Place, SourceBits, Text
from cluster.records import record
from cluster.spec.acceptance import LEAST_WEIGHT, AcceptanceModel, Seen
from cluster.spec.forest import Forest, Indices, Mask
from cluster.spec.held_trees import HeldTrees, MergedTrees
from cluster.spec.merge_trees import merge_trees
from cluster.spec.tree import below

# The most trees of one step or merge that are scored: a sample of them is evidence enough.
_MAX_LOOKED_AT = 16


@record
class Offers:
    """One tree per text of the batch, the union of its drafters' reachable ones.

    survival: float32[n], calibrated, not increasing along a path.  sources: uint32[n], which
    drafters have proposed the node, as bits over its text's names.  is_pooled, is_looked_up:
    bool[n], a pool drafter, or a look-up among the residents, has proposed the node.
    """

    forest: Forest
    survival: FloatArray
    sources: SourceBits
    is_pooled: Mask
    is_looked_up: Mask

    def keep(self, kept: Mask) -> Offers:
        """Return the offers with only the nodes where `kept` is set; each node's parent is kept."""
        return Offers(
            self.forest.keep(kept),
            self.survival[kept],
            self.sources[kept],
            self.is_pooled[kept],
            self.is_looked_up[kept],
        )


@dataclass(slots=True)
class _Row:
    """The tree of one drafter for the text at place `index` of the batch."""

    index: int
    name: str
    text: Text
    held: HeldTree


def gather(batch: Sequence[Text], acceptance: AcceptanceModel) -> Offers | None:
    """The offers for `batch`; None when no drafter has anything for any of it.

    Held trees are re-rooted at the last committed token.  Each is calibrated only once.
    """
    rows: list[_Row] = []
    for index, text in enumerate(batch):
        for name, held in text.held.items():
            if held.is_shadow:
                continue
            if held.place is not None:
                held.settle()
            rows.append(_Row(index, name, text, held))
    if not any(len(row.held.tree.token_ids) for row in rows):
        return None
    found = merge_trees(_held(rows, len(batch), acceptance))
    _note(rows, found)
    if found.merged.num_nodes == 0:
        return None
    sources = np.zeros(found.merged.num_nodes, dtype=np.uint32)
    np.bitwise_or.at(sources, found.places, _sources_of(rows, found))
    return Offers(
        found.merged,
        found.survival,
        sources,
        _is_proposed(found, [not row.held.is_resident for row in rows]),
        _is_proposed(found, [row.held.is_look_up for row in rows]),
    )


def look_at(batch: Sequence[Text], turn: int) -> None:
    """Remember some of the held trees, to be scored by the text that follows.

    If there are many, `turn` selects a different part each time.  Shadow trees are included.
    """
    held = [
        (text, name, tree)
        for text in batch
        if text.is_coupled  # other texts follow what was verified: `cluster.worker.verified`
        for name, tree in text.held.items()
    ]
    stride = -(-len(held) // _MAX_LOOKED_AT) if held else 1
    for text, name, tree in held[turn % stride :: stride]:
        _remember(text, name, tree)


def _remember(text: Text, name: str, tree: HeldTree) -> None:
    if tree.place is not None:
        tree.settle()
    # What is left of a model's former tree says little of the trees that it would draft now.
    is_rest = tree.is_resident and not tree.is_look_up and tree.proposed_len < len(text.tokens)
    if tree.base_len <= len(text.tokens) and not is_rest:
        text.seen.append(Seen.of(name, text.group, tree.base_len, tree.tree, tree.survival))


def _held(rows: Sequence[_Row], num_groups: int, acceptance: AcceptanceModel) -> HeldTrees:
    """Return the trees as they were proposed, or what the last batch has left of them."""
    scores = {key: acceptance.known(*key) for key in {(row.name, row.text.group) for row in rows}}
    priors = {key: score.weight() for key, score in scores.items()}
    weights = [
        row.text.standing.expected(row.name, len(row.text.tokens), priors[row.name, row.text.group])
        for row in rows
    ]
    for row, weight in zip(rows, weights, strict=True):
        if row.name != POOL:  # the coordinator has applied its drafters' weights
            row.text.weights[row.name] = weight
    return HeldTrees(
        [row.held.tree for row in rows],
        [row.held.survival for row in rows],
        [row.held.calibrated for row in rows],
        [scores[row.name, row.text.group].calibrator for row in rows],
        [row.text.tokens.since(row.held.base_len) for row in rows],
        [row.index for row in rows],
        # Merging takes losses in nats: exp(-loss) is a drafter's weight.
        [-math.log(max(weight, LEAST_WEIGHT)) for weight in weights],
        num_groups,
    )


def _note(rows: Sequence[_Row], found: MergedTrees) -> None:
    """Store with each text what has become of its trees."""
    bounds = found.left.starts.tolist()
    for index, (row, root) in enumerate(zip(rows, found.roots.tolist(), strict=True)):
        held, text = row.held, row.text
        if root == -2:
            del text.held[row.name]
        elif root >= 0:
            kept = below(held.tree.parents, root)
            if held.sources is not None:
                held.sources = held.sources[kept]
            if held.laws:
                places = {root: -1, **{node: place for place, node in enumerate(kept.tolist())}}
                held.laws = {places[at]: law for at, law in held.laws.items() if at in places}
            held.place = Place(found.left, found.claimed, found.calibrated, index)
            held.base_len = len(text.tokens)
        elif held.calibrated is None:
            held.calibrated = found.calibrated[bounds[index] : bounds[index + 1]]


def _sources_of(rows: Sequence[_Row], found: MergedTrees) -> SourceBits:
    """Return the drafters of each node that is left: uint32[n]."""
    bits = [
        1 << row.text.names.index(row.name) if row.name in row.text.names else 0 for row in rows
    ]
    sources = np.array(bits, dtype=np.uint32)[found.left.owners]
    for index, row in enumerate(rows):
        if row.held.sources is not None:
            nodes = found.left.span(index)
            sources[nodes] = row.held.sources[: nodes.stop - nodes.start]
    return sources


def _is_proposed(found: MergedTrees, is_meant: Sequence[bool]) -> Mask:
    """Return the nodes that at least one selected tree has; is_meant: which trees are selected."""
    if all(is_meant) or not any(is_meant):
        return np.full(found.merged.num_nodes, is_meant[0])
    is_proposed = np.zeros(found.merged.num_nodes, dtype=np.bool_)
    is_proposed[found.places[np.array(is_meant)[found.left.owners]]] = True
    return is_proposed


def plain_items(texts: Sequence[Text]) -> list[InFlight]:
    """Return items without drafts for these texts."""
    return [PLAIN] * len(texts)


def in_flight_of(texts: Sequence[Text], offers: Offers, nodes: Indices) -> list[InFlight]:
    """Return an item for each text, with its nodes among the chosen ones."""
    if len(nodes) == 0:
        return plain_items(texts)
    is_chosen = np.zeros(offers.forest.num_nodes, dtype=np.bool_)
    is_chosen[nodes] = True
    chosen = offers.keep(is_chosen)
    trees, bounds = chosen.forest.split(), chosen.forest.starts.tolist()
    return [
        InFlight(tree, chosen.sources[start:stop], chosen.survival[start:stop])
        if stop > start
        else PLAIN
        for tree, start, stop in zip(trees, bounds, bounds[1:], strict=False)
    ]
