"""The trees that the drafters of a batch have sent, and what becomes of them: plain records."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.forest import Floats, Forest, Indices
from cluster.spec.survival import Calibrator


@record(frozen=True, slots=True, eq=False)
class HeldTrees:
    """One tree per drafter and sequence, those of a sequence side by side; parallel lists.

    claimed: float32[n] each, survivals.  calibrated: these after calibration, None = not yet done,
    which `calibrators` do then.  committed: tokens since the tree was proposed, int32.
    groups: each tree's sequence, ascending, of num_groups.  losses: of its drafter on the
    sequence's text, in nats per token; NaN = unknown.
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
        """Each once, in the order of their first trees."""
        return list({id(each): each for each in self.calibrators}.values())


@record(frozen=True, slots=True, eq=False)
class KnownTrees:
    """Trees of which it is known what followed them, and where that is entered; parallel lists.

    base_lens: of the text at each tree's root.  followed: the tokens behind it.  next_steps: see
    `AcceptanceModel.learn`, None = everywhere.  scores: two of each tree, by their place in sums
    and calibrators, which native code writes.
    """

    trees: Sequence[TokenTree]
    claimed: Sequence[FloatArray]
    base_lens: Sequence[int]
    followed: Sequence[TokenArray]
    next_steps: Sequence[Indices | None]
    scores: Sequence[tuple[int, int]]
    sums: Sequence[Floats]
    calibrators: Sequence[Calibrator]


@record(frozen=True, slots=True, eq=False)
class MergedTrees:
    """What has become of the trees.

    roots: int64[trees], which of the tree's nodes is the last committed token now; -1 = it has not
    moved, -2 = the text has left the tree.  left: the trees below their roots.  claimed,
    calibrated: float32[n] of these, given that the root was reached.
    merged: the union of each sequence's trees.  survival: float32[m], not increasing along a path.
    places: int64[n], where in the union each node that is left has gone.
    """

    roots: Indices
    left: Forest
    claimed: FloatArray
    calibrated: FloatArray
    merged: Forest
    survival: FloatArray
    places: Indices
