"""A text as the control loop sees it: the trees that are held for it, and their use so far.

A coordinator's session holds one, a target's text is one (`cluster.worker.texts`), and the replay
of recorded texts makes others.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray, TokenTree
from cluster.records import frozen
from cluster.requests.fields import Laws
from cluster.spec import evidence
from cluster.spec.acceptance import Group
from cluster.spec.budget import NO_DRAFTS, Ask, Standing
from cluster.spec.native.trees import Fate, Seen
from cluster.spec.step_profile import DRAFT_LENGTHS, MAX_COMMIT
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import Indices, walk
from cluster.spec.trials import MAX_WAITING, Trial

# Records of the drafters inside a target, as its control loop sees them.


# The residents that are asked for a text, by name.
Team = frozenset[str]


@frozen
class Resident:
    """A drafter inside the target.  is_look_up: it runs no model."""

    name: str
    is_look_up: bool


# For each node the drafters that proposed it, as bits over the drafters of a text.
SourceBits = npt.NDArray[np.uint32]
NO_SOURCES: SourceBits = np.empty(0, dtype=np.uint32)
NO_SOURCES.setflags(write=False)
MAX_DRAFTERS = 32  # of one text
# Tokens of a text that a drafter may lack which is of no use in it at present: look-ups learn from
# all texts, and a commit of many tokens costs little more than one of a few.
MAX_LAG = 64

# The name under which the pool's merged tree is held, beside the residents' names.
POOL = "pool"


@dataclass(slots=True, eq=False)
class HeldTree:
    """The newest tree of one drafter; it continues the first `base_len` tokens.

    proposed_len: base_len as proposed, before any re-rooting; orders proposals that overtook
    each other.  is_resident: it was drafted inside the target and cost the target's own time.
    calibrated: the claimed survivals after calibration, None = not yet done.  is_look_up: it comes
    from a resident that runs no model.
    sources: uint32[n], only of the pool's tree: the drafters that had proposed each node, as bits
    over `Text.names`.  laws: by parent.
    """

    base_len: int
    proposed_len: int
    tree: TokenTree
    survival: FloatArray
    is_resident: bool = False
    calibrated: FloatArray | None = None
    is_look_up: bool = False
    sources: SourceBits | None = None
    laws: Laws = field(default_factory=dict)


class Text:
    """One text that is being written.

    group: its task class, and whether it is sampled; drafts fare alike within a group.
    max_draft_tokens: the most in one step; cap: what the caps leave of it for the next one.
    latency_class: gives its speed a weight beside that of other texts.  names: its drafters, at
    most MAX_DRAFTERS.  weights: the trust in each of them when its tree was last
    merged.  held: the newest tree of each drafter.
    seen: trees whose outcome is not known yet.  num_steps: the steps of the text so far.
    ask, asked: the drafts to make after its step, and by which residents, None = by all; standing:
    how its drafters have fared in it.
    draft_len, fates, verified_depth: of `coordinator.draft_length`; the present length, 0 = none
    yet; accepted tokens and depth of the latest trees; the depth of the one under way.
    is_coupled: its tokens do not depend on its drafts.
    lot: of its request, for rollouts.  shadows, resting: those of its drafters that are scored
    only, or asked for nothing.  beside: the shadows that draft wherever another one does, with that
    one; trials: of such pairs.
    """

    def __init__(self, text_id: str, group: Group, tokens: TokenLog) -> None:
        self.id = text_id
        self.group, self.is_sampled = group, group[1]
        self.tokens = tokens
        self.max_draft_tokens = self.cap = 0
        self.is_plain = False  # it is to have no drafts at present
        self.latency_class = ""
        self.draft_len = self.verified_depth = 0
        self.fates: tuple[tuple[int, int], ...] = ()
        self.names: tuple[str, ...] = ()
        self.weights: dict[str, float] = {}
        self.held: dict[str, HeldTree] = {}
        self.seen: deque[Seen] = deque()
        self.tokens_per_step = 1.0
        self.num_steps = 0
        self.ask = NO_DRAFTS
        self.asked: Team | None = None
        self.standing = Standing()
        self.is_coupled = True
        self.lot = 1.0
        self.shadows: frozenset[str] = frozenset()
        self.resting: frozenset[str] = frozenset()
        self.beside: dict[str, str] = {}
        self.trials: dict[tuple[str, str], Trial] = {}
        # By drafter, `Fate.next_steps`.
        self._next_steps: defaultdict[str, Indices] = defaultdict(
            lambda: np.zeros(len(DRAFT_LENGTHS), dtype=np.int64)
        )
        self._asked_lens: dict[str, int] = {}  # by drafter, the length when it was asked last

    def is_read(self, drafter: str) -> bool:
        """True if a model that is asked now need not read the text first."""
        asked_len = self._asked_lens.get(drafter)
        return asked_len is not None and len(self.tokens) - asked_len <= MAX_COMMIT

    def may_ask(self, drafter: str) -> bool:
        """True if a drafter is one of the text's and does not rest."""
        return drafter in self.names and drafter not in self.resting

    def take_ask(
        self, ask: Ask, team: Team | None = None, residents: Sequence[Resident] = ()
    ) -> None:
        """Ask a team of these residents, None = all; models among them are about to read the rest
        of the text."""
        if self.beside and team is not None:
            for each in residents:
                if self.beside.get(each.name) in team:
                    team |= {each.name}
        self.ask, self.asked = ask, team
        if ask.num_nodes:
            for each in residents:
                if self.asks(each.name):
                    self._asked_lens[each.name] = len(self.tokens)

    def asks(self, resident: str) -> bool:
        """True if a resident is asked for the drafts after its step."""
        return self.asked is None or resident in self.asked

    def emitted(self, num_tokens: int) -> None:
        """Note that a round has brought num_tokens tokens."""
        self.tokens_per_step += evidence.RECENT * (max(num_tokens, 1) - self.tokens_per_step)

    def keep_newest(
        self, drafter: str, base_len: int, tree: TokenTree, survival: FloatArray
    ) -> HeldTree | None:
        """Hold a drafter's newest tree; returns None if a newer one has overtaken it."""
        former = self.held.get(drafter)
        if former is not None and base_len < former.proposed_len:
            return None
        held = self.held[drafter] = HeldTree(base_len, base_len, tree, survival)
        return held

    def forget(self, drafter: str) -> None:
        """Drop the trees of a drafter with another model now, which has not read the text."""
        self.held.pop(drafter, None)
        self.weights.pop(drafter, None)
        self.standing.forget(drafter)
        self.seen = deque(seen for seen in self.seen if seen.drafter != drafter)
        self.trials = {pair: each for pair, each in self.trials.items() if drafter not in pair}
        self._asked_lens.pop(drafter, None)

    def owners(self, sources: Sequence[int]) -> list[int]:
        """Return the drafter that each node is credited to, so that the counts by drafter add up:
        of those that proposed it, the one with the largest weight; -1 where it is none of these.

        sources: each node's drafters, as bits."""
        weights = [self.weights.get(name, 0.0) for name in self.names]
        order = sorted(range(len(weights)), key=lambda place: -weights[place])
        return [next((place for place in order if bits >> place & 1), -1) for bits in sources]

    def has_tree_left(self, drafter: str) -> bool:
        """True if a drafter's tree has nodes after the last committed token."""
        held = self.held.get(drafter)
        if held is None:
            return False
        committed = self.tokens.since(held.base_len)
        path = walk(held.tree, committed)
        node = path[-1] if path else -1
        return len(path) == len(committed) and node in held.tree.parents.tolist()

    def due(self, *, ends: bool = False) -> list[Fate]:
        """Remove and return the trees whose outcome is known by now; ends: the text is over."""
        found: list[Fate] = []
        while self.seen:
            first = self.seen[0]
            depth = first.depth
            is_known = len(self.tokens) - first.base_len >= depth
            if not (is_known or ends or len(self.seen) > MAX_WAITING):
                break
            self.seen.popleft()
            found.append(
                Fate(
                    first,
                    self.tokens.since(first.base_len, first.base_len + depth),
                    self._next_steps[first.drafter],
                )
            )
        return found
