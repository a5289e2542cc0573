"""Reads one answer of a chat: its text without reasoning and calls, and these beside it."""

from __future__ import annotations

from cluster.core import TokenArray
from cluster.text.dialect import Dialect
from cluster.text.tool_calls.base import CallPiece, Part, Said
from deployments.ingress.tools import ChatUse


class Reading:
    """Of one choice.  has_calls: whether there were any so far.

    is_cut: whether the text so far ends within a call, or before one that is forced.
    """

    def __init__(self, use: ChatUse | None, dialect: Dialect, prompt_ids: TokenArray) -> None:
        """use: None = the text is the answer."""
        self.has_calls = False
        self.is_cut = False
        self._use = use or ChatUse()
        self._reader = None
        if use is not None:
            self._reader = dialect.reader(prompt_ids, with_calls=use.reads_calls)

    def push(self, text: str, *, is_last: bool) -> list[Part]:
        """What new text brings, in its order; is_last: it is the end of the answer."""
        if self._reader is None:
            return [Said(text)] if text else []
        parts = self._shown(self._reader.push(text))
        if is_last:
            parts += self._ended(self._shown(self._reader.finish()))
        return parts

    def _shown(self, parts: list[Part]) -> list[Part]:
        shown: list[Part] = []
        for part in parts:
            if isinstance(part, Said):
                if self._use.shows_reasoning or not part.is_reasoning:
                    shown.append(part)
            elif self._use.reads_calls and (self._use.is_parallel or part.index == 0):
                self.has_calls, self.is_cut = True, not part.is_end
                shown.append(part)
        return shown

    def _ended(self, parts: list[Part]) -> list[Part]:
        """What the end of the text has brought: text is then the beginning of a forced call."""
        if not self._use.is_forced:
            return parts
        kept = [part for part in parts if isinstance(part, CallPiece) or part.is_reasoning]
        self.is_cut |= len(kept) < len(parts) or not self.has_calls
        return kept


def skips_specials(use: ChatUse | None, dialect: Dialect) -> bool:
    """Whether special tokens are left out of the text that is read."""
    return use is None or not dialect.shows_specials(with_calls=use.reads_calls)
