"""Where a model's reasoning begins and ends in its text, and how it is read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from cluster.core import TokenArray
from cluster.records import frozen
from cluster.text.tool_calls.base import Reads, Said, UnreadText


@frozen
class ReasoningMarkers:
    """The texts before and after the reasoning, and their tokens."""

    start: str
    end: str
    start_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()

    def begins_inside(self, prompt_ids: Sequence[int] | TokenArray) -> bool | None:
        """True if the prompt begins the reasoning, False if it ends it too, None if it does
        neither."""
        tail = tuple(prompt_ids[-_NUM_TAIL_TOKENS:])
        started, ended = _last(tail, self.start_ids), _last(tail, self.end_ids)
        return None if started == ended else started > ended

    def read(self, source: UnreadText, *, begins_inside: bool | None) -> Reads[None]:
        """Read the reasoning before an answer, if there is any.

        White space before the opening marker and behind the closing one belongs to neither.
        """
        if begins_inside is None:
            at = yield from source.after_space(0)
            if not (yield from source.has(self.start, at)):
                return  # the model answers at once
            source.take(at + len(self.start))
        end = yield from source.until((self.end,), partial(Said, is_reasoning=True))
        source.take(len(end))
        source.take((yield from source.after_space(0)))


# A template that leaves the reasoning out writes both markers at the very end of the prompt.
_NUM_TAIL_TOKENS = 16


def reasoning_style(template: str) -> str | None:
    """The reasoning that a chat template shows: "think", "harmony" or None."""
    if "<|channel|>" in template:
        return "harmony"
    return "think" if "</think>" in template else None


def _last(tokens: tuple[int, ...], part: tuple[int, ...]) -> int:
    """Where `part` stands for the last time; -1 where it does not, or is empty."""
    found = (at for at in range(len(tokens)) if part and tokens[at : at + len(part)] == part)
    return max(found, default=-1)
