"""Plain records of the trees that a batch's drafters have sent, of their merge and their fates."""

from __future__ import annotations

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.survival import Calibrator
from cluster.spec.tree import Forest, Indices, depths


@record
class Held:
    """The tree of one drafter for one sequence of a batch.

    group: the number of its sequence.  claimed: its survivals, float32[n].  calibrated: the
    survivals after calibration; None = not yet done, and `calibrator` will do it.  committed: the
    tokens that were committed since the tree was proposed, int32.  weight: of its drafter on the
    sequence's text, above 0, on any scale.
    """

    group: int
    tree: TokenTree
    claimed: FloatArray
    calibrated: FloatArray | None
    calibrator: Calibrator
    committed: TokenArray
    weight: float = 1.0


@record
class Seen:
    """A tree that was held for a text of base_len tokens, re-rooted there.

    claimed: float32[n], survivals as the drafter claims them.
    """

    drafter: str
    group: tuple[str, bool]
    base_len: int
    tree: TokenTree
    claimed: FloatArray

    @property
    def depth(self) -> int:
        """Of its deepest node."""
        return int(depths(self.tree.parents).max(initial=0))


@record
class Fate:
    """A tree and the text after it.

    followed: the committed tokens after its root.  If the tree is deeper than that, the outcome of
    the nodes beyond them is unknown, and they do not count.  next_steps: int64[DRAFT_LENGTHS], the
    text's length at which the next step would begin if every step verified so many nodes of this
    drafter; `learn` updates it in place.  None = everywhere.
    """

    seen: Seen
    followed: TokenArray
    next_steps: Indices | None = None


@record
class MergedTrees:
    """The result of re-rooting, calibrating and merging trees.

    roots: int64[trees], the node of each tree that is now the last committed token; -1 = the root
    has not moved, -2 = the text has left the tree.  left: the trees below their new roots.
    claimed, calibrated: float32[n], the survivals of the nodes in `left`, given that the root was
    reached.  merged: the union of each sequence's trees.  survival: float32[m], not increasing
    along a path.  places: int64[n], the place in the union of each node in `left`.
    """

    roots: Indices
    left: Forest
    claimed: FloatArray
    calibrated: FloatArray
    merged: Forest
    survival: FloatArray
    places: Indices
