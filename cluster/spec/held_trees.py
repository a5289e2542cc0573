"""Plain records of the trees that a batch's drafters have sent, and of their merge."""

from __future__ import annotations

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.forest import Forest, Indices
from cluster.spec.survival import Calibrator


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
