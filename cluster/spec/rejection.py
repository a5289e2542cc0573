"""The textbook's laws of acceptance, by the ratio of the target's probability to the drafter's.

Drafts of one place are tried in turn: a single one as in Leviathan et al. (2023) and Chen et al.
(2023), siblings that were drawn without replacement as in Sequoia (Chen et al. 2024), after
SpecInfer's multi-step.

The text has the target's law but depends on the drafts, unlike under `cluster.spec.tree`.  It has
that law only if a draft law is the very one that its drafts were drawn from, if nothing that shapes
a tree looks at a drawn token, and if no number below is used again: a step looks at no place
behind the one where it stops.  Drafts without a law count as chosen: their law has all its mass on
them.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from cluster.core import TokenArray, TokenTree, token_array
from cluster.requests.fields import DraftLaw, Laws
from cluster.spec.noise import random_words
from cluster.spec.tree import Floats, Indices, children

# A law whose mass is below this has none but for rounding.
_LEAST_MASS = 1e-12
# What a number decides.  The last word of the noise of `cluster.spec.noise` is 0, so no number here
# is one of those.
ACCEPTS, EMITS = 1, 2
# Weights that are summed at once: drawing adds up some hundred numbers in place of a vocabulary,
# and takes a tenth of the time.
_BLOCK = 256

# The target's law after a node of the tree, -1 = the context: float64[vocab], with the sum 1 but
# for rounding.
LawOf = Callable[[int], Floats]


def uniforms(
    use: npt.ArrayLike,
    seed: npt.ArrayLike,
    stream: npt.ArrayLike,
    position: npt.ArrayLike,
    rank: npt.ArrayLike = 0,
) -> Floats:
    """Return numbers in [0, 1), float64 of the arguments' broadcast shape.

    position: of the output.  rank: of a draft among its siblings.
    """
    high, low, _, _ = random_words(seed, (rank, position, stream, use))
    bits = (high >> np.uint64(5)) << np.uint64(26) | low >> np.uint64(6)
    return np.asarray(bits, dtype=np.float64) * 2.0**-53


def try_in_turn(
    target: Floats, draft: Floats | None, token_ids: Indices, numbers: Floats
) -> tuple[Indices, Floats]:
    """Try siblings one after another.  Leading axes are independent cases.

    target: float64[..., vocab].  draft: float64[..., vocab], the law of the first sibling, None =
    they were chosen.  token_ids, numbers: [..., siblings], in the order of drawing.
    Returns (the accepted sibling int64[...], -1 = none; the law of what is emitted then).
    """
    accepted = np.full(target.shape[:-1], -1, dtype=np.int64)
    for rank in range(token_ids.shape[-1]):
        token = token_ids[..., rank, None]
        law = _all_on(token, target) if draft is None else draft
        mass = np.take_along_axis(law, token, -1)
        number = numbers[..., rank, None]
        # A law without mass has no further sibling to give.
        is_tried = (accepted[..., None] < 0) & (mass > 0.0)
        passes = is_tried & (number * mass < np.take_along_axis(target, token, -1))
        accepted = np.where(passes[..., 0], rank, accepted)
        fails = is_tried & ~passes
        target = np.where(fails, _normalised(np.maximum(target - law, 0.0), target), target)
        if draft is not None:
            rest = law * (1.0 - _all_on(token, law))
            draft = np.where(fails, _normalised(rest, np.zeros_like(rest)), draft)
    return accepted, target


def _normalised(weights: Floats, otherwise: Floats) -> Floats:
    """Return weights over their sum along the last axis; `otherwise` where that is nothing."""
    mass = weights.sum(-1, keepdims=True)
    has_mass = mass >= _LEAST_MASS
    return np.where(has_mass, weights / np.where(has_mass, mass, 1.0), otherwise)


def draw_from(weights: Floats, number: float) -> int:
    """Return the token at which the weights' running sum exceeds that share of their sum.

    weights: float64[vocab], not all of them zero.
    """
    sums = np.add.reduceat(weights, np.arange(0, len(weights), _BLOCK)).cumsum()
    limit = min(number * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(np.searchsorted(sums, limit, side="right"))
    inner = weights[block * _BLOCK : (block + 1) * _BLOCK]
    below = inner.cumsum() + (sums[block - 1] if block else 0.0)
    place = int(np.searchsorted(below, limit, side="right"))
    if place == len(inner):  # by rounding
        place = int(np.flatnonzero(inner)[-1])
    return block * _BLOCK + place


def walk_in_turn(
    tree: TokenTree,
    laws: Laws,
    law_of: LawOf,
    key: tuple[int, int, int],
) -> tuple[TokenArray, TokenArray]:
    """Try the children of one node after another, from the root down.

    laws: by parent, -1 = the context; the siblings in the tree's order are the first that were
    drawn.  key: seed, stream and the output position at which the step begins.
    Returns (path, token_ids) as `cluster.spec.tree.walk_draws` does.
    """
    below, (seed, stream, root) = children(tree.parents), key
    node, path = -1, list[int]()
    while True:
        target, own = law_of(node), below[node + 1]
        if not own:
            weights = target
            break
        tokens = tree.token_ids[own].astype(np.int64)
        part = _Part(target, laws.get(node), tokens)
        numbers = uniforms(ACCEPTS, seed, stream, root + len(path), np.arange(len(own)))
        accepted, rest = try_in_turn(part.target, part.draft, part.tokens, numbers)
        if accepted < 0:
            weights = part.widened(target, rest)
            break
        node = own[int(accepted)]
        path.append(node)
    last = draw_from(weights, float(uniforms(EMITS, seed, stream, root + len(path))))
    return token_array(path), token_array([*tree.token_ids[path].tolist(), last])


class _Part:
    """The tokens of a vocabulary that drafts may have been, and one entry for all the others.

    What is no draft loses nothing to one, so the laws of the others only change in their sum.
    target, draft: float64[ids + 1].  tokens: the drafts' places.
    """

    def __init__(self, target: Floats, law: DraftLaw | None, tokens: Indices) -> None:
        """tokens: the drafts at one place."""
        self._ids = ids = tokens if law is None else law.token_ids
        own = target[ids]
        self.target = np.append(own, max(1.0 - own.sum(), 0.0))
        self.draft = None if law is None else np.append(law.probs, 0.0)
        self.tokens = np.array([int(np.flatnonzero(ids == token)[0]) for token in tokens.tolist()])

    def widened(self, target: Floats, law: Floats) -> Floats:
        """Return the weights over the vocabulary that a law over the parts means."""
        others = self.target[-1]
        weights: Floats = target * (law[-1] / others if others > 0.0 else 0.0)
        weights[self._ids] = law[:-1]
        return weights


def _all_on(token: Indices, like: Floats) -> Floats:
    """Return the law with all its mass on one token.  token: int64[..., 1]."""
    law = np.zeros(np.broadcast_shapes(token.shape, like.shape))
    np.put_along_axis(law, token, 1.0, -1)
    return law
