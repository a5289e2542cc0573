"""Plain records of the trees that a batch's drafters have sent, and of their merge and scores."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.forest import Floats, Forest, Indices
from cluster.spec.survival import Calibrator


@record
class HeldTrees:
    """One tree per drafter and sequence, those of a sequence side by side; parallel lists.

    claimed: the survivals of each tree, float32[n].  calibrated: the survivals after calibration;
    None = not yet done, and `calibrators` will do it.  committed: the tokens that were committed
    since the tree was proposed, int32.  groups: the number of each tree's sequence, ascending,
    below num_groups.  losses: the loss of the tree's drafter on the sequence's text, in nats per
    token; NaN = unknown.
    """

    trees: Sequence[TokenTree]
    claimed: Sequence[FloatArray]
    calibrated: Sequence[FloatArray | None]
    calibrators: Sequence[Calibrator]
    committed: Sequence[TokenArray]
    groups: Sequence[int]
    losses: Sequence[float]
    num_groups: int

    def distinct_calibrators(self) -> list[Calibrator]:
        """Return each calibrator once, in the order of their first trees."""
        return list({id(each): each for each in self.calibrators}.values())


@record
class KnownTrees:
    """Trees whose outcome is known, and the scores to enter it into; parallel lists.

    base_lens: the length of the text at each tree's root.  followed: the tokens after the root.
    next_steps: see `AcceptanceModel.learn`, None = everywhere.  scores: the two scores of each
    tree, as indices into sums and calibrators, which native code writes.
    """

    trees: Sequence[TokenTree]
    claimed: Sequence[FloatArray]
    base_lens: Sequence[int]
    followed: Sequence[TokenArray]
    next_steps: Sequence[Indices | None]
    scores: Sequence[tuple[int, int]]
    sums: Sequence[Floats]
    calibrators: Sequence[Calibrator]


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
