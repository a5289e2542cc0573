"""Where a model's reasoning begins and ends in its text, and how to split it off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

from cluster.core import TokenArray
from cluster.records import frozen

# Markers in a text that comes in pieces.


def held_len(text: str, markers: Iterable[str]) -> int:
    """How many characters at the end of `text` may be the beginning of a marker."""
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    return longest


def first_of(text: str, markers: Iterable[str]) -> tuple[str, str, str] | None:
    """The text before the first marker in it, the marker, and the text after it; None without."""
    places = [(text.find(marker), -len(marker), marker) for marker in markers]
    found = min((place for place in places if place[0] >= 0), default=None)
    if found is None:
        return None
    at, _, marker = found
    return text[:at], marker, text[at + len(marker) :]


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
        tail = list(prompt_ids[-_NUM_TAIL_TOKENS:])
        started, ended = _last(tail, self.start_ids), _last(tail, self.end_ids)
        return None if started == ended else started > ended


# A template that leaves the reasoning out writes both markers at the very end of the prompt.
_NUM_TAIL_TOKENS = 16

MARKERS: Mapping[str, tuple[str, str]] = MappingProxyType({"think": ("<think>", "</think>")})


def reasoning_style(template: str) -> str | None:
    """The reasoning that a chat template shows: a key of MARKERS, "harmony" or None."""
    if "<|channel|>" in template:
        return "harmony"
    return "think" if "</think>" in template else None


def _last(tokens: Sequence[int], part: Sequence[int]) -> int:
    if not part:
        return -1
    starts = range(len(tokens) - len(part), -1, -1)
    return next((at for at in starts if tuple(tokens[at : at + len(part)]) == tuple(part)), -1)


class ReasoningSplitter:
    """Splits a text as it comes into its reasoning and its answer.

    White space before the opening marker and behind the closing one belongs to neither.
    """

    def __init__(self, markers: ReasoningMarkers, *, begins_inside: bool | None) -> None:
        """begins_inside: as `ReasoningMarkers.begins_inside` says."""
        self._markers = markers
        self._held = ""
        self._is_open = begins_inside is not False
        self._needs_start = begins_inside is None
        self._skips_space = False

    def push(self, text: str) -> tuple[str, str]:
        """New text of the answer, and of the reasoning."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._needs_start:
            opening = text.lstrip()
            if opening.startswith(self._markers.start):
                text, self._needs_start = opening[len(self._markers.start) :], False
            elif self._markers.start.startswith(opening):
                self._held = text
                return "", ""
            else:  # the model answers at once
                self._needs_start = self._is_open = False
        if self._is_open:
            before, found, after = text.partition(self._markers.end)
            if not found:
                held = held_len(text, (self._markers.end,))
                self._held = text[len(text) - held :]
                return "", text[: len(text) - held]
            self._is_open, self._skips_space = False, True
            text, reasoning = after, before
        if self._skips_space:
            text = text.lstrip()
            self._skips_space = not text
        return text, reasoning

    def finish(self) -> tuple[str, str]:
        """The text that was held back, as `push` returns it."""
        held, self._held = self._held, ""
        return ("", held) if self._is_open and not self._needs_start else (held, "")
