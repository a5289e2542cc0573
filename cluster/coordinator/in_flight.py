"""What a target is to work on next, and what it is working on for a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from cluster.coordinator.texts import Text
from cluster.core import EMPTY_TREE, FloatArray, TokenArray, TokenTree
from cluster.records import record
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.credit import credited, is_proposed
from cluster.spec.forest import Mask

_NO_CLAIMS: FloatArray = np.empty((0, 0), dtype=np.float32)
_NO_CLAIMS.setflags(write=False)
_ALL = slice(None)
# Why a step has no drafts: to verify or to make some would not have paid.
NOT_WORTH_IT = "not worth it"


@record(frozen=True, slots=True, eq=False)
class InFlight:
    """The item a target is working on for a session, and where its tree came from.

    drafters: the one with the largest weight first; a node of several counts for the first of them.
    num_proposed: how many of the nodes each of the drafters proposed.
    claimed: float32[k, n], k at least as many as drafters; row i: the survival that drafters[i]
    claimed for each node, NaN where it did not propose it.
    """

    context_len: int
    tree: TokenTree = EMPTY_TREE
    drafters: tuple[str, ...] = ()
    num_proposed: tuple[int, ...] = ()
    claimed: FloatArray = field(default_factory=lambda: _NO_CLAIMS)

    def proposed(self, nodes: TokenArray | slice = _ALL) -> Mask:
        """bool[drafters, nodes]: which of the drafters had proposed which of the nodes."""
        return is_proposed(self.claimed[: len(self.drafters), nodes])

    def credited(self, path: TokenArray) -> tuple[list[int], list[int]]:
        """Nodes of the accepted `path` that count for each drafter, and those that it had proposed
        and that count for another."""
        if len(self.drafters) <= 1:
            return [len(path)] * len(self.drafters), [0] * len(self.drafters)
        return credited(self.proposed(path))

    def sources(self, path: TokenArray, num_tokens: int) -> tuple[tuple[str, ...], ...]:
        """Which drafters had proposed each of the first num_tokens tokens of the accepted `path`
        and of what the target drew after it; the first of them is the one that it counts for."""
        nodes = path[:num_tokens]
        if len(self.drafters) <= 1:
            found = [self.drafters] * len(nodes)
        else:
            found = [
                tuple(name for name, is_its in zip(self.drafters, row, strict=True) if is_its)
                for row in self.proposed(nodes).T.tolist()
            ]
        return (*found, *[()] * (num_tokens - len(nodes)))


@dataclass(frozen=True, slots=True)
class Moment:
    """When a batch is planned.

    max_wait_s: how long it may wait for drafts.  waited_s: it has waited for this very step.
    residents: which of the target's may be asked, by `Ask.with_models`; none = it has none.
    """

    now: float
    max_wait_s: float = 0.0
    waited_s: float = 0.0
    residents: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do next: verify `in_flight`, one per text, or wait for drafts first.

    ask: what residents are to draft for each text after the step.
    wait_s > 0: better drafts are expected within so many seconds, for the texts `awaited`.
    why: in a word, why it is so, for the log and for statistics.
    """

    in_flight: list[InFlight]
    ask: Ask = NO_DRAFTS
    wait_s: float = 0.0
    awaited: tuple[int, ...] = ()
    why: str = ""

    def note_asked(self, texts: Sequence[Text]) -> None:
        """Models are about to read what they lack of these."""
        if self.ask.num_nodes and self.ask.with_models:
            for place, text in enumerate(texts):
                if place not in self.ask.unread:
                    text.asked_len = len(text.tokens)


@record(frozen=True, slots=True, eq=False)
class Round:
    """A finished round, as the controller learns from it.

    texts, num_tokens: parallel; plain steps that the tokens of each would have taken.  asked: what
    residents were to draft, in draft_time_s; nothing where that time tells nothing.  num_read:
    texts that models have read in it.
    step_time_s: the round without what residents drafted and without waits; None = not measured.
    """

    texts: Sequence[Text]
    num_tokens: Sequence[int]
    num_nodes: int
    is_sampled: bool
    step_time_s: float | None
    asked: Ask = NO_DRAFTS
    draft_time_s: float = 0.0
    num_read: int = 0
    waited_s: float = 0.0
