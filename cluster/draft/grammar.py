"""Drafts what a request's grammar leaves no choice about: keys, punctuation, the ends of names.

It runs inside the target, where the grammars are compiled; a text without one gets no tree.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import DraftedRequest
from cluster.draft.plugin import Draft, RequestState, TextDrafter
from cluster.errors import ConfigError, RequestError
from cluster.grammar.text import ConstrainedText
from cluster.records import frozen


@frozen
class GrammarOptions:
    """It has none."""


class GrammarDrafter(TextDrafter):
    """The forced tokens after the text, each with survival 1."""

    is_look_up = True  # see `Drafter`

    def __init__(self, context: DrafterContext, options: GrammarOptions) -> None:
        """Raises ConfigError outside of a target."""
        super().__init__(context)
        if context.open_text is None:
            path = f"drafters.{context.name}.placement"
            raise ConfigError.at(
                path,
                "a drafter of kind grammar runs inside the target; set it to {with: target}",
            )
        self._open = context.open_text
        # By request: its output under its grammar; None where there is none to follow.
        self._followed: dict[str, ConstrainedText | None] = {}

    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        """See `TextDrafter.draft`."""
        if request.request_id not in self._followed:
            self._followed[request.request_id] = self._opened(request)
        text = self._followed[request.request_id]
        forced = [] if text is None else list(text.forced())[:max_nodes]
        if not forced:
            return None
        return Draft(TokenTree.chain(forced), np.ones(len(forced), dtype=np.float32))

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        super().release(request_ids)
        for request_id in request_ids:
            self._followed.pop(request_id, None)

    def _forget_tree(self, request: DraftedRequest) -> None:
        super()._forget_tree(request)
        self._followed.pop(request.request_id, None)

    def _advance(self, request: DraftedRequest, kept_len: int, token_ids: TokenArray) -> None:
        text, start = self._followed.get(request.request_id), max(kept_len, request.prompt_len)
        super()._advance(request, kept_len, token_ids)
        if text is None:
            return
        if start - request.prompt_len == len(text):
            self._followed[request.request_id] = _pushed(text, request.text.since(start))
        else:  # tokens were taken back, so it is opened again when drafts are wanted
            self._followed.pop(request.request_id, None)

    def _opened(self, request: RequestState) -> ConstrainedText | None:
        if request.params.grammar is None:
            return None
        try:
            text = self._open(request.params.grammar)
        except RequestError:
            return None  # the target refuses the request itself
        return _pushed(text, request.text.since(request.prompt_len))


def _pushed(text: ConstrainedText, token_ids: TokenArray) -> ConstrainedText | None:
    """The text with these tokens; None where it cannot follow."""
    try:
        return text if all(map(text.push, token_ids.tolist())) else None
    except RequestError:
        return None  # the target ends the request itself
