"""Records of a step: its plan, the nodes under verification, and the finished round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.plan.texts import NO_SOURCES, SourceBits, Text
from cluster.records import record
from cluster.requests.plain_why import PlainWhy
from cluster.spec.budget import NO_DRAFTS, Ask


@record(frozen=True, slots=True, eq=False)
class InFlight:
    """The nodes that a step verifies for a text, and their drafters.

    sources: uint32[n], the drafters that proposed each node, as bits over `Text.names`.  survival:
    float32[n], calibrated.
    """

    tree: TokenTree = EMPTY_TREE
    sources: SourceBits = field(default_factory=lambda: NO_SOURCES)
    survival: FloatArray = field(default_factory=lambda: EMPTY_FLOATS)


PLAIN = InFlight()


@dataclass(frozen=True, slots=True)
class Moment:
    """The circumstances under which a batch is planned.

    residents: which kinds of residents may be asked, by `Ask.with_models`; empty = the target has
    none.  prompt_rows: rows of prompts in the same step.  wall_s: the time since the epoch, None =
    not known.
    """

    now: float
    residents: tuple[bool, ...] = ()
    prompt_rows: int = 0
    wall_s: float | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The plan of a step: verify `in_flight`, one item per text.

    ask: the drafts that residents are to make for each text after the step.
    why: the reason why there is nothing to verify, if there is nothing.  num_unserved: the texts
    whose `min_tokens_per_s` is out of reach.
    """

    in_flight: list[InFlight]
    ask: Ask = NO_DRAFTS
    why: PlainWhy = PlainWhy.NONE
    num_unserved: int = 0

    def note_asked(self, texts: Sequence[Text]) -> None:
        """Note that models are about to read the rest of these texts."""
        if self.ask.num_nodes and self.ask.with_models:
            for place, text in enumerate(texts):
                if place not in self.ask.unread:
                    text.asked_len = len(text.tokens)


@record(frozen=True, slots=True, eq=False)
class Round:
    """A finished round, as the controller learns from it.

    texts, num_tokens: parallel; the plain steps that the tokens of each text would have taken.
    asked: the drafts that residents were asked for and made in draft_time_s; nothing if that time
    is no valid measurement.  num_read: the texts that models have read in that time.
    step_time_s: the time of the round without drafting; None = not measured.  prompt_rows: rows of
    prompts in the same step; if there are any, drafting is not timed.
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
