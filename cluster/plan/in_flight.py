"""What a step is to verify, why, and what it took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core import EMPTY_TREE, TokenTree
from cluster.messages import PlainWhy
from cluster.plan.texts import NO_SOURCES, SourceBits, Text
from cluster.records import record
from cluster.spec.budget import NO_DRAFTS, Ask


@record(frozen=True, slots=True, eq=False)
class InFlight:
    """The nodes that a step verifies for a text, and where they came from.

    sources: uint32[n], of each node the drafters that proposed it, as bits over `Text.names`.
    """

    tree: TokenTree = EMPTY_TREE
    sources: SourceBits = field(default_factory=lambda: NO_SOURCES)


PLAIN = InFlight()


@dataclass(frozen=True, slots=True)
class Moment:
    """When a batch is planned.

    residents: which of the target's may be asked, by `Ask.with_models`; none = it has none.
    prompt_rows: of the same step.
    """

    now: float
    residents: tuple[bool, ...] = ()
    prompt_rows: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What to do next: verify `in_flight`, one per text.

    ask: what residents are to draft for each text after the step.
    why: there is nothing to verify, if there is nothing.
    """

    in_flight: list[InFlight]
    ask: Ask = NO_DRAFTS
    why: PlainWhy = PlainWhy.NONE

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
    step_time_s: the round without what residents drafted; None = not measured.  prompt_rows: that
    it had beside these texts'; drafting is not timed then.
    """

    texts: Sequence[Text]
    num_tokens: Sequence[int]
    num_nodes: int
    is_sampled: bool
    step_time_s: float | None
    asked: Ask = NO_DRAFTS
    draft_time_s: float = 0.0
    num_read: int = 0
    prompt_rows: int = 0
