"""Lowers how many nodes a step may verify for a text: by schedules, and by the operator's rules.

Nothing here raises a limit.  The planner chooses below these caps, and the guard stays under all.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from datetime import datetime
from zoneinfo import ZoneInfo

from cluster.config.draft_length import DraftLengthConfig
from cluster.plan.in_flight import InFlight
from cluster.plan.texts import Text
from cluster.spec import evidence
from cluster.spec.acceptance import AcceptanceModel, Group
from cluster.spec.schedule import BOUNDS, Rule, first_len, next_len
from cluster.spec.tree import depths

# Drafters that rest are tried in one step of so many: in the first turn their drafts are made, and
# in the second verified.
_TRIED_EVERY, _TURNS = 64, 2


class DraftLength:
    """The schedule of a target.  Its state of a text lies in the `Text`."""

    def __init__(self, settings: DraftLengthConfig) -> None:
        self._settings = settings
        self._rules = [Rule.of(each) for each in settings.overrides]
        self._zone = ZoneInfo(settings.time_zone) if settings.time_zone else None
        self._num_sequences = 1
        self._resting: AbstractSet[tuple[str, Group]] = frozenset()
        self._idle: AbstractSet[Group] = frozenset()  # groups whose drafters all rest

    def resting(self, acceptance: AcceptanceModel, turn: int) -> AbstractSet[tuple[str, Group]]:
        """Return the drafters, each with a group, of which this turn verifies no drafts."""
        settings, former = self._settings, self._resting
        if settings.kind != "alpha":
            return frozenset()
        known = {(name, group): score for name, group, score in acceptance if score.num_trees}
        self._resting = {
            key for key, score in known.items()
            if score.num_trees >= evidence.FEW and score.expected(0)[0]
            < (settings.return_at if key in former else settings.stop_below)
        }  # fmt: skip
        is_tried = turn % _TRIED_EVERY < _TURNS
        resting: AbstractSet[tuple[str, Group]] = frozenset() if is_tried else self._resting
        self._idle = {group for _, group in resting} - {
            group for _, group in known.keys() - resting
        }
        return resting

    def set_caps(
        self, texts: Sequence[Text], wall_s: float | None, num_sequences: int | None = None
    ) -> None:
        """Set the caps of these texts.

        wall_s: the time since the epoch.  num_sequences: of their step, None = as of the last one.
        """
        self._num_sequences = num_sequences or self._num_sequences
        known = wall_s is not None and bool(self._rules)
        local = datetime.fromtimestamp(wall_s or 0.0, self._zone) if known else None
        rules = [rule for rule in self._rules if rule.holds_at(local)]
        for text in texts:
            text.cap = self._cap(text, rules)

    def _cap(self, text: Text, rules: Sequence[Rule]) -> int:
        if text.is_plain:
            return 0
        settings, cap = self._settings, text.max_draft_tokens
        if settings.kind == "constant":
            cap = min(cap, settings.num_tokens)
        elif settings.kind in BOUNDS:
            text.draft_len = text.draft_len or first_len(settings, cap)
            cap = min(cap, text.draft_len)
        elif text.group in self._idle:
            cap = 0
        task = text.group[0].partition("@")[0]  # without its adapter
        for rule in rules:
            if rule.is_for(text.latency_class, task, self._num_sequences):
                return min(cap, rule.override.max_draft_tokens)
        return cap

    def note(self, texts: Sequence[Text], in_flight: Sequence[InFlight]) -> None:
        """Note the trees that a step verifies."""
        if self._settings.kind in BOUNDS:
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
