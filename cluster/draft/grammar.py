"""Drafts what a request's grammar leaves no choice about: keys, punctuation, the ends of names.

It runs inside the target, where the grammars are compiled; a text without one gets no tree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import FloatArray, TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.committed_text import DraftedRequest, WholeTreeDrafter
from cluster.errors import ConfigError, RequestError
from cluster.grammar.text import ConstrainedText
from cluster.records import frozen


@frozen
class GrammarOptions:
    """It has none."""


@dataclass(slots=True, eq=False)
class GrammarState(DraftedRequest):
    """followed: its output under its grammar, opened when drafts are wanted; None where there is
    none to follow."""

    is_open: bool = False
    followed: ConstrainedText | None = None


class GrammarDrafter(WholeTreeDrafter[GrammarState]):
    """The forced tokens after the text, each with survival 1."""

    is_look_up = True  # see `Drafter`

    def __init__(self, context: DrafterContext, options: GrammarOptions) -> None:
        """Raises ConfigError outside of a target."""
        super().__init__(context, GrammarState.opened_by)
        if context.open_text is None:
            path = f"drafters.{context.name}.placement"
            raise ConfigError.at(
                path,
                "a drafter of kind grammar runs inside the target; set it to {with: target}",
            )
        self._open = context.open_text

    def _drafts(
        self, asked: Sequence[tuple[GrammarState, int]]
    ) -> Iterator[tuple[GrammarState, TokenTree, FloatArray]]:
        for request, max_nodes in asked:
            if not request.is_open:
                request.is_open, request.followed = True, self._opened(request)
            forced = [] if request.followed is None else list(request.followed.forced())
            tree = TokenTree.chain(forced[:max_nodes])
            yield request, tree, np.ones(len(tree), dtype=np.float32)

    def _forget_tree(self, request: GrammarState) -> None:
        super()._forget_tree(request)
        request.is_open = False

    def _advance(self, request: GrammarState, kept_len: int, token_ids: TokenArray) -> None:
        is_open, is_cut = request.is_open, kept_len < len(request.text)
        super()._advance(request, kept_len, token_ids)
        if is_open and not is_cut:  # else it is opened again
            request.is_open = True
            if request.followed is not None:
                request.followed = _pushed(
                    request.followed, request.text.since(max(kept_len, request.prompt_len))
                )

    def _opened(self, request: GrammarState) -> ConstrainedText | None:
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
