"""Records of a step: its plan, the nodes under verification, and the finished round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.plan.resident import Resident
from cluster.plan.texts import NO_SOURCES, SourceBits, Text
from cluster.records import frozen, record
from cluster.requests.plain_why import PlainWhy
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.step_profile import DraftTime


@record
class InFlight:
    """The nodes that a step verifies for a text, and their drafters.

    sources: uint32[n], the drafters that proposed each node, as bits over `Text.names`.  survival:
    float32[n], calibrated.
    """

    tree: TokenTree = EMPTY_TREE
    sources: SourceBits = field(default_factory=lambda: NO_SOURCES)
    survival: FloatArray = field(default_factory=lambda: EMPTY_FLOATS)


PLAIN = InFlight()


@frozen
class Moment:
    """The circumstances under which a batch is planned.

    residents: those that may be asked.  prompt_rows: rows of prompts in the same step.
    """

    now: float
    residents: tuple[Resident, ...] = ()
    prompt_rows: int = 0

    def among(self, texts: Sequence[Text]) -> Moment:
        """Return it with the residents that one of these texts may ask: the others cost nothing."""
        own = tuple(
            each for each in self.residents if any(text.may_ask(each.name) for text in texts)
        )
        return self if len(own) == len(self.residents) else replace(self, residents=own)


@record
class Plan:
    """The plan of a step: verify `in_flight`, one item per text.

    ask: the drafts that residents are to make for each text after the step.  masks: the residents
    that are asked, as `Text.ask_mask`; empty = everyone for each text.
    why: the reason why there is nothing to verify, if there is nothing.
    """

    in_flight: list[InFlight]
    ask: Ask = NO_DRAFTS
    why: PlainWhy = PlainWhy.NONE
    masks: Sequence[int] = ()

    @classmethod
    def plain(
        cls,
        texts: Sequence[Text],
        why: PlainWhy = PlainWhy.NONE,
        ask: Ask = NO_DRAFTS,
        masks: Sequence[int] = (),
    ) -> Plan:
        """Return the plan of a step without drafts."""
        return cls([PLAIN] * len(texts), ask, why, masks)


@record
class Round:
    """A finished round, as the controller learns from it.

    texts, num_tokens: parallel; the plain steps that the tokens of each text would have taken.
    draft_time_s: of the residents after the last step.  turns: of each of them; empty if these are
    no valid measurements.
    step_time_s: the time of the round without drafting; None = not measured.  prompt_rows: rows of
    prompts in the same step; if there are any, drafting is not timed.
    """

    texts: Sequence[Text]
    num_tokens: Sequence[int]
    num_nodes: int
    step_time_s: float | None
    draft_time_s: float = 0.0
    turns: Sequence[DraftTime] = ()
    prompt_rows: int = 0
