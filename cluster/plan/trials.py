"""Trials: both drafters of a rollout at the same places of a text, to be judged by what follows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from cluster.core import EMPTY_TREE, Proposal, TokenTree
from cluster.plan.lead import Stretch
from cluster.spec.token_log import TokenLog
from cluster.spec.tree import prune, walk

# A drafter is judged by so many of its best nodes, which is also as deep as they may go.
NUM_JUDGED = 4
# Places of one text that are judged together.
PLACES_OF_STRETCH = 10
# The most places of one text that wait for their outcome.
_MAX_WAITING = 8


class Trial:
    """Two drafters along one text.  pair: the candidate and the former.  phase: of the rollout when
    it began; its places are evidence of that phase alone."""

    def __init__(self, pair: tuple[str, str], phase: str) -> None:
        self.pair, self.phase = pair, phase
        # By length of the text before them, the best nodes of each drafter; one that is not there
        # had no draft, or none in time.
        self._places: dict[int, dict[str, TokenTree]] = {}
        self._next_steps = [0, 0]  # the length at which the next step with each would begin
        self._sums = [0.0] * 4
        self._num_places = 0

    def keep(self, drafter: str, proposal: Proposal) -> None:
        """Keep the newest tree of one of them for a place."""
        trees = self._places.setdefault(proposal.base_len, {})
        trees[drafter], _, _ = prune(proposal.tree, proposal.survival, NUM_JUDGED)

    def take_due(self, tokens: TokenLog, *, ends: bool) -> Iterator[tuple[int, Stretch]]:
        """Judge the places whose outcome is known; yield each stretch that is complete, with its
        number of places.  ends: the text is over."""
        while self._places:
            base_len = next(iter(self._places))
            is_known = len(tokens) - base_len >= NUM_JUDGED
            if not (is_known or ends or len(self._places) > _MAX_WAITING):
                break
            self._judge(base_len, self._places.pop(base_len), tokens)
            if self._num_places >= PLACES_OF_STRETCH:
                yield self._take()
        if ends and self._num_places:
            yield self._take()

    def _judge(self, base_len: int, trees: Mapping[str, TokenTree], tokens: TokenLog) -> None:
        followed = tokens.since(base_len, base_len + NUM_JUDGED)
        if not len(followed):
            return
        self._num_places += 1
        for index, name in enumerate(self.pair):
            if base_len >= self._next_steps[index]:
                _, accepted = walk(trees.get(name, EMPTY_TREE), followed)
                self._next_steps[index] = base_len + accepted + 1
                self._sums[2 * index] += 1.0
                self._sums[2 * index + 1] += accepted

    def _take(self) -> tuple[int, Stretch]:
        taken = self._num_places, tuple(self._sums)
        self._sums, self._num_places = [0.0] * 4, 0
        return taken
