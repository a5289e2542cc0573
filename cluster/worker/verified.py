"""The nodes that a step verifies for a text that is not coupled to its drafts.

Such a text follows what was verified, so only these nodes are scored, and all trees that were not
verified would be judged by a text that somebody else has shaped.
"""

from __future__ import annotations

from cluster.core import TokenTree
from cluster.plan.texts import Text
from cluster.requests.acceptance_law import NO_LAWS, Laws
from cluster.spec.held_trees import Seen
from cluster.spec.tree import children, edges


def laws_of_verified(text: Text, tree: TokenTree) -> Laws:
    """Note that a step verifies these nodes, and return the laws that they were drawn from.

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
    text.seen.append(Seen.of(name, text.group, length, tree, held.survival[places]))
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
    known = edges(whole)
    places: list[int] = []
    for parent, token in zip(part.parents.tolist(), part.token_ids.tolist(), strict=True):
        place = known.get((places[parent] if parent >= 0 else -1, token))
        if place is None:
            return None
        places.append(place)
    return places
