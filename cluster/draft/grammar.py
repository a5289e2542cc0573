"""Drafts what a request's grammar leaves no choice about: keys, punctuation, the ends of names.

It runs inside the target, where the grammars are compiled; a text without one gets no tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.draft.base import DrafterContext
from cluster.draft.plugin import Draft, RequestState, TextDrafter
from cluster.errors import ConfigError, RequestError
from cluster.grammar.text import ConstrainedText
from cluster.requests.grammar_spec import GrammarSpec


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """It has none."""


@dataclass(slots=True, eq=False)
class _Followed:
    """A text as the grammar sees it.  text: None where it is past use.  tokens: that it holds."""

    request: RequestState  # keeps its id from another's use
    spec: GrammarSpec
    text: ConstrainedText | None
    tokens: TokenArray


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
        self._followed: dict[int, _Followed] = {}

    def draft(self, request: RequestState, max_nodes: int) -> Draft | None:
        """See `TextDrafter.draft`."""
        spec = request.params.grammar
        text = None if spec is None else self._text_of(request, spec)
        forced = [] if text is None else list(text.forced())[:max_nodes]
        if not forced:
            return None
        return Draft(TokenTree.chain(forced), np.ones(len(forced), dtype=np.float32))

    def release(self, request_ids: Sequence[str]) -> None:
        """See `Drafter.release`."""
        for request_id in request_ids:
            state = self._requests.pop(request_id)
            if state is not None:
                self._followed.pop(id(state), None)

    def _text_of(self, request: RequestState, spec: GrammarSpec) -> ConstrainedText | None:
        """The grammar's text, brought up to the committed one; None where it cannot follow."""
        output = request.text.since(request.prompt_len)
        found = self._followed.get(id(request))
        if found is None or found.spec != spec:
            found = _Followed(request, spec, self._opened(spec), output[:0])
            self._followed[id(request)] = found
        if found.text is None:
            return None
        shared = min(len(output), len(found.tokens))
        differing = np.flatnonzero(output[:shared] != found.tokens[:shared])
        kept = int(differing[0]) if len(differing) else shared
        found.text.truncate(kept)
        found.tokens = output.copy()
        try:
            can_follow = all(map(found.text.push, output[kept:].tolist()))
        except RequestError:
            can_follow = False  # the target ends the request itself
        if not can_follow:
            found.text = None
        return found.text

    def _opened(self, spec: GrammarSpec) -> ConstrainedText | None:
        try:
            return self._open(spec)
        except RequestError:
            return None  # the target refuses the request itself
