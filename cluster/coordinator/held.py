"""What a drafter has sent for a session: the tree at hand, and what followed the last commit."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.core import FloatArray, TokenTree
from cluster.spec.forest import Forest


@dataclass(slots=True, eq=False)
class Place:
    """Where a tree stands in the arrays of a batch.

    claimed, calibrated: float32[n], survivals of all the forest's nodes.
    """

    forest: Forest
    claimed: FloatArray
    calibrated: FloatArray
    index: int


@dataclass(slots=True, eq=False)
class HeldTree:
    """The newest tree of one drafter; it continues the first `base_len` tokens.

    proposed_len: base_len as proposed, before any re-rooting; orders proposals that overtook
    each other.  calibrated: the claimed survivals after calibration, None = not yet done.
    place: what is left of it after the last batch, which mostly is replaced before the next one.
    """

    base_len: int
    proposed_len: int
    tree: TokenTree
    survival: FloatArray
    calibrated: FloatArray | None = None
    place: Place | None = None

    def settle(self) -> None:
        """Take what is left of the tree out of the arrays of the last batch."""
        place, self.place = self.place, None
        if place is not None:
            nodes = place.forest.span(place.index)
            self.tree = place.forest.tree(place.index)
            self.survival, self.calibrated = place.claimed[nodes], place.calibrated[nodes]


@dataclass(slots=True, eq=False)
class Growth:
    """What followed the last commit at one drafter.

    is_hit: whether a part of its former tree outlived the commit, None = not looked at yet.
    is_learned: it is one of the commits that the price list of waiting is learned from.
    trees: of these, (seconds since the commit, tree, claimed survivals) in order of arrival.
    at_hand: the calibrated survivals of what outlived the commit.
    is_complete: nothing else comes.
    """

    committed_at: float
    context_len: int
    is_learned: bool
    is_answered: bool = False
    is_complete: bool = False
    is_hit: bool | None = None
    at_hand: FloatArray | None = None
    trees: list[tuple[float, TokenTree, FloatArray]] = field(default_factory=list)

    def look(self, proposed_len: int | None, at_hand: FloatArray | None = None) -> None:
        """Take note of the tree at hand, when it is that of before the commit.

        proposed_len: of that tree, None = there is none.  at_hand: its calibrated survivals.
        """
        if self.is_hit is None and (proposed_len is None or proposed_len < self.context_len):
            self.is_hit, self.at_hand = proposed_len is not None, at_hand
