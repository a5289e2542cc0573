"""Reads one answer of a chat: its text without reasoning and calls, and these beside it."""

from __future__ import annotations

from dataclasses import replace

from cluster.core import TokenArray
from cluster.text.dialect import Dialect
from cluster.text.tool_calls.base import Parsed
from deployments.ingress.tools import ChatUse


class Reading:
    """Of one choice.  has_calls: whether there were any so far."""

    def __init__(self, use: ChatUse | None, dialect: Dialect, prompt_ids: TokenArray) -> None:
        """use: None = the text is the answer."""
        self.has_calls = False
        self._use = use
        self._reader = None
        if use is not None:
            self._reader = dialect.reader(prompt_ids, with_calls=use.reads_calls)

    def push(self, text: str, *, is_last: bool) -> Parsed:
        """What new text brings; is_last: it is the end of the answer."""
        if self._reader is None or self._use is None:
            return Parsed(text)
        parsed = self._reader.push(text)
        if is_last:
            rest = self._reader.finish()
            parsed = Parsed(
                parsed.text + rest.text,
                (*parsed.calls, *rest.calls),
                parsed.reasoning + rest.reasoning,
            )
        calls = parsed.calls
        if not self._use.is_parallel:
            calls = tuple(piece for piece in calls if piece.index == 0)
        if not self._use.reads_calls:
            calls = ()
        self.has_calls |= bool(calls)
        reasoning = parsed.reasoning if self._use.shows_reasoning else ""
        return replace(parsed, calls=calls, reasoning=reasoning)


def skips_specials(use: ChatUse | None, dialect: Dialect) -> bool:
    """Whether special tokens are left out of the text that is read."""
    return use is None or not dialect.shows_specials(with_calls=use.reads_calls)
