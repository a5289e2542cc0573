"""Lowers how many nodes a step may verify for a text: by caps, and by the operator's rules.

Nothing here raises a limit.  The planner chooses below these caps, and the guard stays under all.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.config.draft_length import DraftLengthConfig
from cluster.plan.in_flight import InFlight
from cluster.plan.texts import Text
from cluster.spec.tree import depths

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
