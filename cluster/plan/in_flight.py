"""What a step has: the trees at hand, the nodes under verification, its plan, and the finished
round."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.plan.texts import NO_SOURCES, POOL, Resident, SourceBits, Team, Text
from cluster.records import frozen, record
from cluster.requests.fields import NO_LAWS, Laws, PlainWhy
from cluster.spec import evidence
from cluster.spec.acceptance import LEAST_WEIGHT, AcceptanceModel, Group, Score
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.native.trees import Held, MergedTrees, Seen, merge_trees
from cluster.spec.step_profile import DraftTime
from cluster.spec.tree import Forest, Indices, Mask, below, children, ranked


@record
class InFlight:
    """The nodes that a step verifies for a text, and their drafters.

    sources: uint32[n], the drafters that proposed each node, as bits over `Text.names`.  survival:
    float32[n], calibrated.
    """

    tree: TokenTree
    sources: SourceBits
    survival: FloatArray


PLAIN = InFlight(EMPTY_TREE, NO_SOURCES, EMPTY_FLOATS)


@frozen
class Moment:
    """The circumstances under which a batch is planned.

    residents: those that may be asked.  prompt_rows: rows of prompts in the same step.
    """

    now: float
    residents: tuple[Resident, ...] = ()
    prompt_rows: int = 0

    def among(self, texts: Sequence[Text]) -> Moment:
        """Return it with the residents that one of these texts may ask: the others cost nothing."""
        own = tuple(
            each for each in self.residents if any(text.may_ask(each.name) for text in texts)
        )
        return self if len(own) == len(self.residents) else replace(self, residents=own)


@record
class Plan:
    """The plan of a step: verify `in_flight`, one item per text.

    ask: the drafts that residents are to make for each text after the step.  teams: the residents
    that are asked, as `Text.asked`; empty = all for each text.
    why: the reason why there is nothing to verify, if there is nothing.
    """

    in_flight: list[InFlight]
    ask: Ask = NO_DRAFTS
    why: PlainWhy = PlainWhy.NONE
    teams: Sequence[Team | None] = ()

    @property
    def is_plain(self) -> bool:
        """True if nothing is to be verified, nor drafted after the step."""
        return not (self.ask.num_nodes or any(len(each.tree) for each in self.in_flight))

    @classmethod
    def plain(
        cls,
        texts: Sequence[Text],
        why: PlainWhy = PlainWhy.NONE,
        ask: Ask = NO_DRAFTS,
        teams: Sequence[Team | None] = (),
    ) -> Plan:
        """Return the plan of a step without drafts."""
        return cls([PLAIN] * len(texts), ask, why, teams)


@record
class Round:
    """A finished round, as the controller learns from it.

    texts, num_tokens: parallel; the plain steps that the tokens of each text would have taken.
    draft_time_s: of the residents after the last step.  turns: of each of them; empty if these are
    no valid measurements.
    step_time_s: the time of the round without drafting; None = not measured.  prompt_rows: rows of
    prompts in the same step; if there are any, drafting is not timed.
    """

    texts: Sequence[Text]
    num_tokens: Sequence[int]
    num_nodes: int
    step_time_s: float | None
    draft_time_s: float = 0.0
    turns: Sequence[DraftTime] = ()
    prompt_rows: int = 0


# The trees that a batch's drafters offer at present, re-rooted, calibrated and merged together.


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


def gather(batch: Sequence[Text], acceptance: AcceptanceModel) -> Offers | None:
    """The offers for `batch`; None when no drafter has anything for any of it.

    Held trees are re-rooted at the last committed token.  Each is calibrated only once.
    """

    @functools.cache  # drafters and groups are few
    def known(name: str, group: Group) -> tuple[Score, float]:
        score = acceptance.known(name, group)
        return score, score.weight()

    rows = [
        (text, name, _held(index, text, name, *known(name, text.group)))
        for index, text in enumerate(batch)
        for name in text.held
        if name not in text.shadows
    ]
    if not any(len(row.tree.token_ids) for _, _, row in rows):
        return None
    found = merge_trees([row for _, _, row in rows], len(batch))
    own = [text.held[name] for text, name, _ in rows]
    _note(rows, found)
    if found.merged.num_nodes == 0:
        return None
    owners = found.left.owners
    is_pooled = np.array([not held.is_resident for held in own])[owners]
    is_looked_up = np.array([held.is_look_up for held in own])[owners]
    sources = np.array(
        [1 << text.names.index(name) if name in text.names else 0 for text, name, _ in rows],
        dtype=np.uint32,
    )[owners]
    for index, held in enumerate(own):
        if held.sources is not None:
            sources[found.left.span(index)] = held.sources
    united = np.zeros((3, found.merged.num_nodes), dtype=np.uint32)
    for union, values in zip(united, (sources, is_pooled, is_looked_up), strict=True):
        np.bitwise_or.at(union, found.places, values)
    return Offers(found.merged, found.survival, united[0], united[1] > 0, united[2] > 0)


def look_at(batch: Sequence[Text], turn: int) -> None:
    """Remember some of the held trees, to be scored by the text that follows.

    If there are many, a few are evidence enough, and `turn` selects others each time.  Shadow trees
    are included.
    """
    held = [
        (text, name, tree)
        for text in batch
        if text.is_coupled  # for other texts: `laws_of_verified`
        for name, tree in text.held.items()
    ]
    stride = -(-len(held) // evidence.FEW) if held else 1
    for text, name, tree in held[turn % stride :: stride]:
        # What is left of a model's former tree says little of the trees that it would draft now.
        is_rest = tree.is_resident and not tree.is_look_up and tree.proposed_len < len(text.tokens)
        if tree.base_len <= len(text.tokens) and not is_rest:
            text.seen.append(Seen(name, text.group, tree.base_len, tree.tree, tree.survival))


def laws_of_verified(text: Text, tree: TokenTree) -> Laws:
    """Note that a step verifies these nodes of a text that is not coupled to its drafts, and return
    the laws that they were drawn from.

    Such a text follows what was verified, so only these nodes are scored: trees that were not
    verified would be judged by a text that somebody else has shaped.
    There is none where nodes of several drafters are merged, nor for siblings of which others than
    the last are missing: these count as chosen, which is exact too.
    """
    if len(tree) == 0 or len(text.held) != 1:
        return NO_LAWS
    ((name, held),) = text.held.items()
    places = _places(tree, held.tree)
    if places is None:
        return NO_LAWS
    length = len(text.tokens)
    text.seen.append(Seen(name, text.group, length, tree, held.survival[places]))
    if not held.laws:
        return NO_LAWS
    laws = {}
    drawn = children(held.tree.parents)
    for parent, own in enumerate(children(tree.parents), start=-1):
        at = places[parent] if parent >= 0 else -1
        known = [places[node] for node in own]
        if own and at in held.laws and known == drawn[at + 1][: len(own)]:
            laws[parent] = held.laws[at]
    return laws


def _places(part: TokenTree, whole: TokenTree) -> list[int] | None:
    """Return where the nodes of a part stand in the whole tree; None = it is no part of it."""
    edges = zip(whole.parents.tolist(), whole.token_ids.tolist(), strict=True)
    known = {edge: node for node, edge in enumerate(edges)}
    places: list[int] = []
    for parent, token in zip(part.parents.tolist(), part.token_ids.tolist(), strict=True):
        place = known.get((places[parent] if parent >= 0 else -1, token))
        if place is None:
            return None
        places.append(place)
    return places


def _held(index: int, text: Text, name: str, score: Score, prior: float) -> Held:
    """Return a tree as it was proposed, or what the last batch has left of it."""
    held, weight = text.held[name], text.standing.expected(name, len(text.tokens), prior)
    if name != POOL:  # the coordinator has applied its drafters' weights
        text.weights[name] = weight
    return Held(
        index,
        held.tree,
        held.survival,
        held.calibrated,
        score.calibrator,
        text.tokens.since(held.base_len),
        max(weight, LEAST_WEIGHT),
    )


def _note(rows: Sequence[tuple[Text, str, Held]], found: MergedTrees) -> None:
    """Store with each text what has become of its trees."""
    trees = found.left.split()
    for index, ((text, name, _), root) in enumerate(zip(rows, found.roots.tolist(), strict=True)):
        held = text.held[name]
        if root == -2:
            held.sources = None  # no node is left
            del text.held[name]
            continue
        if root >= 0:
            held.base_len = len(text.tokens)
            if held.sources is not None or held.laws:
                kept = below(held.tree.parents, root)
                if held.sources is not None:
                    held.sources = held.sources[kept]
                places = {root: -1, **{node: place for place, node in enumerate(kept.tolist())}}
                held.laws = {places[at]: law for at, law in held.laws.items() if at in places}
        nodes = found.left.span(index)
        held.tree, held.survival = trees[index], found.claimed[nodes]
        held.calibrated = found.calibrated[nodes]


def in_flight_of(offers: Offers, nodes: Indices) -> list[InFlight]:
    """Return an item for each text of the offers, with its nodes among the chosen ones."""
    if len(nodes) == 0:
        return [PLAIN] * (len(offers.forest.starts) - 1)
    if len(nodes) < offers.forest.num_nodes:
        is_chosen = np.zeros(offers.forest.num_nodes, dtype=np.bool_)
        is_chosen[nodes] = True
        offers = offers.keep(is_chosen)
    trees, bounds = offers.forest.split(), offers.forest.starts.tolist()
    return [
        InFlight(tree, offers.sources[start:stop], offers.survival[start:stop])
        if stop > start
        else PLAIN
        for tree, start, stop in zip(trees, bounds, bounds[1:], strict=False)
    ]


def best_of(offers: Offers, most: Sequence[int]) -> list[InFlight]:
    """Return an item for each text of the offers, with its best nodes, at most so many of each."""
    forest = offers.forest
    nodes, ranks = ranked(offers.survival, forest.owners, forest.starts)
    chosen = nodes[ranks < np.array(most, dtype=np.int64)[forest.owners]]
    return in_flight_of(offers, chosen)
