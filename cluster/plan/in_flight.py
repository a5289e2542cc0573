"""Records of a step: its plan, the nodes under verification, and the finished round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field, replace

from cluster.config.draft_length import DraftLengthConfig
from cluster.core import EMPTY_FLOATS, EMPTY_TREE, FloatArray, TokenTree
from cluster.plan.texts import NO_SOURCES, Resident, SourceBits, Text
from cluster.records import frozen, record
from cluster.requests.fields import PlainWhy
from cluster.spec.budget import NO_DRAFTS, Ask
from cluster.spec.step_profile import DraftTime
from cluster.spec.tree import depths


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

    @property
    def is_plain(self) -> bool:
        """True if nothing is to be verified, nor drafted after the step."""
        return not (self.ask.num_nodes or any(len(each.tree) for each in self.in_flight))

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


# Lowers how many nodes a step may verify for a text: by caps, and by the operator's rules.
#
# Nothing here raises a limit. The planner chooses below these caps, and the guard stays under
# all.


# For each kind that follows a text, its bounds where the configuration names none; None = what the
# text may have.
_BOUNDS: dict[str, tuple[int, int | None]] = {"heuristic": (1, None), "window": (3, 12)}


class DraftLength:
    """The caps of a target.  Their state of a text lies in the `Text`."""

    def __init__(self, settings: DraftLengthConfig) -> None:
        self._settings = settings
        self._num_sequences = 1

    def set_caps(self, texts: Sequence[Text], num_sequences: int | None = None) -> None:
        """Set the caps of these texts.

        num_sequences: of their step, None = as of the last one.
        """
        self._num_sequences = num_sequences or self._num_sequences
        for text in texts:
            text.cap = self._cap(text)

    def _cap(self, text: Text) -> int:
        if text.is_plain:
            return 0
        settings, cap = self._settings, text.max_draft_tokens
        if settings.kind == "constant":
            cap = min(cap, settings.num_tokens)
        elif settings.kind in _BOUNDS:
            text.draft_len = text.draft_len or next_len(settings, settings.num_tokens, (), cap)
            cap = min(cap, text.draft_len)
        task = text.group[0].partition("@")[0]  # without its adapter
        for rule in settings.overrides:
            if rule.is_for(text.latency_class, task, self._num_sequences):
                return min(cap, rule.max_draft_tokens)
        return cap

    def note(self, texts: Sequence[Text], in_flight: Sequence[InFlight]) -> None:
        """Note the trees that a step verifies."""
        if self._settings.kind in _BOUNDS:
            for text, item in zip(texts, in_flight, strict=True):
                text.verified_depth = int(depths(item.tree.parents).max(initial=0))

    def learn(self, text: Text, num_tokens: int) -> None:
        """Let a text's length follow its step that was noted last, which brought num_tokens."""
        depth, text.verified_depth = text.verified_depth, 0
        if depth:
            fates = (*text.fates, (min(num_tokens - 1, depth), depth))
            text.fates = fates[-self._settings.num_steps :]
            text.draft_len = next_len(
                self._settings, text.draft_len, text.fates, text.max_draft_tokens
            )


def next_len(
    settings: DraftLengthConfig, draft_len: int, fates: Sequence[tuple[int, int]], most: int
) -> int:
    """Return a text's draft length after a step with drafts, which was draft_len before.

    fates: of its latest steps with drafts, the newest last: accepted tokens, and the tree's depth;
    there are none before its first step.  most: what the text may have.
    """
    if fates and settings.kind == "heuristic":
        accepted, depth = fates[-1]
        draft_len += 2 if accepted == depth else -1
    elif fates:
        share = sum(accepted for accepted, _ in fates) / sum(depth for _, depth in fates)
        draft_len += (share > settings.raise_above) - (share < settings.lower_below)
    least, greatest = _BOUNDS[settings.kind]
    upper = min(settings.max_tokens or greatest or most, most)
    return min(max(draft_len, settings.min_tokens or least), upper)
