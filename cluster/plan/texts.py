"""A text as far as its drafts are concerned: what is at hand for it, and what they have been worth.

A session is one; the replay of recorded texts makes others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, Proposal, TokenArray, TokenTree
from cluster.spec import evidence
from cluster.spec.acceptance import Group, Seen
from cluster.spec.forest import Forest, Indices
from cluster.spec.step_cost import DRAFT_LENGTHS, MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import below, walk

# Bits over the drafters of a text: node by node, whose it is.
SourceBits = npt.NDArray[np.uint32]
NO_SOURCES: SourceBits = np.empty(0, dtype=np.uint32)
NO_SOURCES.setflags(write=False)
MAX_DRAFTERS = 32  # of one text

# What the pool's merged tree is held under, beside the residents' names.
POOL = "pool"

# Trees of a text whose fate is awaited; of more the oldest is scored by what is known.
_MAX_SEEN = 8


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
    each other.  is_resident: it was drafted at the target, which spent its own time on it.
    is_shadow: it is scored and never verified.  calibrated: the claimed survivals after
    calibration, None = not yet done.  place: what is left of it after the last batch, which mostly
    is replaced before the next one.  is_look_up: it is a resident's that runs no model.
    sources: uint32[n], of the pool's tree, which drafters had proposed each node, as bits over
    `Text.names`.
    """

    base_len: int
    proposed_len: int
    tree: TokenTree
    survival: FloatArray
    is_resident: bool = False
    is_shadow: bool = False
    calibrated: FloatArray | None = None
    place: Place | None = None
    is_look_up: bool = False
    sources: SourceBits | None = None

    @property
    def num_nodes(self) -> int:
        """Nodes of the tree, or of what the last batch has left of it."""
        if self.place is None:
            return len(self.tree)
        starts = self.place.forest.starts
        return int(starts[self.place.index + 1] - starts[self.place.index])

    def settle(self) -> None:
        """Take what is left of the tree out of the arrays of the last batch."""
        place, self.place = self.place, None
        if place is not None:
            nodes = place.forest.span(place.index)
            self.tree = place.forest.tree(place.index)
            self.survival, self.calibrated = place.claimed[nodes], place.calibrated[nodes]


class Text:
    """One text that is being written.

    group: its task class, and whether it is sampled: what makes batches homogeneous, and drafts
    alike.  max_draft_tokens: of one step.  weight: what
    its speed counts for beside that of others.  names: of its drafters, at most MAX_DRAFTERS.
    weights: trust in each of these, as it was when its tree was last merged.
    held: the trees at hand, by drafter.  seen: trees whose fate is not known yet.  num_steps: of
    the text so far.  asked_len: its tokens when models were last asked to draft for it.
    """

    def __init__(self, text_id: str, group: Group, tokens: TokenLog) -> None:
        self.id = text_id
        self.group = group
        self.tokens = tokens
        self.max_draft_tokens = 0
        self.weight = 1.0
        self.names: tuple[str, ...] = ()
        self.weights: dict[str, float] = {}
        self.held: dict[str, HeldTree] = {}
        self.seen: deque[Seen] = deque()
        self.tokens_per_step = 1.0
        self.num_steps = 0
        self.asked_len = 0
        self._next_steps: dict[str, Indices] = {}
        self._used_at: dict[str, int] = {}  # by drafter, the last step that verified nodes of it

    @property
    def is_sampled(self) -> bool:
        return self.group[1]

    @property
    def is_read(self) -> bool:
        """Whether models that are asked now need not read it first."""
        return len(self.tokens) - self.asked_len <= MAX_COMMIT

    def next_steps(self, drafter: str) -> Indices:
        """See `AcceptanceModel.learn`."""
        if drafter not in self._next_steps:
            self._next_steps[drafter] = np.zeros(len(DRAFT_LENGTHS), dtype=np.int64)
        return self._next_steps[drafter]

    def stepped(self, drafters: Sequence[str]) -> None:
        """A step has answered that verified drafts of these for this text."""
        self.num_steps += 1
        self._used_at.update(dict.fromkeys(drafters, self.num_steps))

    def num_unused(self, drafter: str) -> int:
        """Steps since a draft of that drafter was last verified for this text."""
        return self.num_steps - self._used_at.get(drafter, 0)

    def emitted(self, num_tokens: int) -> None:
        """A step has brought so many tokens."""
        self.tokens_per_step += evidence.RECENT * (max(num_tokens, 1) - self.tokens_per_step)

    def keep_newest(self, drafter: str, proposal: Proposal) -> HeldTree | None:
        """Hold a drafter's newest tree; None for one that was overtaken on the way."""
        former = self.held.get(drafter)
        length = proposal.base_len
        if former is not None and length < former.proposed_len:
            return None
        held = self.held[drafter] = HeldTree(length, length, proposal.tree, proposal.survival)
        return held

    def by_weight(self) -> list[int]:
        """Numbers of its drafters, the one with the largest weight first."""
        weights = [self.weights.get(name, 0.0) for name in self.names]
        return sorted(range(len(weights)), key=lambda place: -weights[place])

    def has_tree_left(self, drafter: str) -> bool:
        """Whether a drafter's tree goes on behind what is committed."""
        held = self.held.get(drafter)
        if held is None:
            return False
        if held.place is not None:
            held.settle()
        committed = self.tokens.since(held.base_len)
        node, matched = walk(held.tree, committed)
        return (
            matched == len(committed)
            and len(below(held.tree.parents, -1 if node is None else node)) > 0
        )

    def due(self, *, ends: bool = False) -> list[tuple[Seen, TokenArray]]:
        """The trees whose fate is known by now, and what followed them; they are let go of.

        ends: nothing more will follow.
        """
        found: list[tuple[Seen, TokenArray]] = []
        while self.seen:
            first = self.seen[0]
            is_known = len(self.tokens) - first.base_len >= first.depth
            if not (is_known or ends or len(self.seen) > _MAX_SEEN):
                break
            self.seen.popleft()
            found.append((first, self.tokens.since(first.base_len, first.base_len + first.depth)))
        return found
