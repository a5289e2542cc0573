"""One text under a grammar: its reasoning, what the grammar says of the rest, and its end."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cluster.core import EMPTY_TREE, TokenArray, TokenMask, TokenTree
from cluster.errors import RequestError
from cluster.requests.fields import GrammarSpec

if TYPE_CHECKING:  # it takes a second to import
    from cluster.grammar.library import Grammar


class ConstrainedText:
    """The output tokens of one text, to which more are appended.

    After the end of the text only end-of-sequence tokens follow.  A branch of a tree goes on in a
    copy: the library takes tokens back, but some masks are wrong afterwards, and copies take 2 us.
    """

    def __init__(self, grammar: Grammar, spec: GrammarSpec, eos_token_ids: Iterable[int]) -> None:
        self.grammar = grammar
        self._matcher = grammar.matcher()
        self._eos = frozenset(eos_token_ids)
        self._start, self._end = spec.reasoning_start, spec.reasoning_end
        self._tokens: list[int] = []
        self._is_reasoning = bool(self._end and not self._start)
        self._is_over = False  # from the first end-of-sequence token on

    def __len__(self) -> int:
        return len(self._tokens)

    def push(self, token_id: int) -> bool:
        """Append a token; False, and nothing has changed, where it may not stand here.

        Raises RequestError, as `Matcher.push`."""
        if self._is_over:
            if token_id not in self._eos:
                return False
        elif self._is_reasoning:
            self._reason(token_id)
            return True
        elif not self._tokens and self._end and token_id in self._start[:1]:
            self._is_reasoning = True
        elif token_id in self._eos:
            if not self._matcher.may_end():
                return False
            self._is_over = True
        elif not self._matcher.push(token_id):
            return False
        self._tokens.append(token_id)
        return True

    def _reason(self, token_id: int) -> None:
        self._tokens.append(token_id)
        if tuple(self._tokens[-len(self._end) :]) == self._end:
            self._is_reasoning = False
        elif token_id in self._eos:
            # A text may end in the midst of its reasoning: a model cannot be made to conclude.
            self._is_over = True

    def copy(self) -> ConstrainedText:
        """A text with the same tokens, which goes on by itself."""
        found = copy.copy(self)
        found._matcher, found._tokens = self._matcher.copy(), self._tokens.copy()
        return found

    def fill(self, row: TokenMask) -> None:
        """The mask of what may follow.  Raises RequestError, as `Matcher.fill`."""
        if self._is_over:
            row[:] = 0
            _allow(row, self._eos)
        elif self._is_reasoning:
            row[:] = np.uint32(0xFFFFFFFF)
        else:
            self._matcher.fill(row)
            for token in self._eos:
                row[token >> 5] &= ~np.uint32(1 << (token & 31))
            if self._matcher.may_end():
                _allow(row, self._eos)
            if not self._tokens and self._end:
                _allow(row, self._start[:1])

    def forced(self) -> Sequence[int]:
        """The tokens that must follow, as far as they are certain."""
        may_reason = self._is_reasoning or (not self._tokens and self._end)
        return [] if may_reason or self._is_over else self._matcher.forced()

    def possible(self, tree: TokenTree) -> dict[int, ConstrainedText]:
        """This text by -1, and by each node of `tree` that may stand after it, ascending, the text
        up to that node.  Raises as `push`."""
        texts = {-1: self}
        nodes = zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)
        for node, (token, parent) in enumerate(nodes):
            if parent in texts:
                text = texts[parent].copy()
                if text.push(token):
                    texts[node] = text
        return texts


class GrammarHook:
    """Holds the draws of one request to its grammar: it is told of the text, and masks the rows of
    each step.

    The tokens that it forbids at a row depend only on the text before that row; otherwise drafts
    would change the output.  Reported log-probabilities ignore it: they are those of the raw law.
    """

    def __init__(self, text: ConstrainedText) -> None:
        self._text = text
        self._texts: dict[int, ConstrainedText] = {}  # up to the nodes of the present tree

    def extend(self, token_ids: TokenArray) -> None:
        """Append `token_ids` to the output so far.

        Raises RequestError if the grammar would not have allowed the text.
        """
        for token in token_ids.tolist():
            if not self._text.push(token):
                # A library that has given up says so when it is asked what may follow.
                self.prepare(EMPTY_TREE)
                self.masks()
                raise RequestError(
                    f"output token {len(self._text)} is not one that the request's grammar allows; "
                    "resume with the tokens and the grammar of the first stream",
                    param="grammar",
                )

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        """Return the nodes of `tree` that may be drawn after the text, ascending, each with its
        parent.  The others are not verified.

        Raises as `masks`.
        """
        self._texts = self._text.possible(tree)
        return list(self._texts)[1:]

    def masks(self) -> TokenMask:
        """Return the masks of the tokens that may be drawn after the text, and then after each
        node that is left of the prepared tree.  Contiguous.  A row that allows no token ends the
        request with an error.

        Raises RequestError if the request cannot go on.
        """
        rows = self._text.grammar.empty_masks(len(self._texts))
        for text, row in zip(self._texts.values(), rows, strict=True):
            text.fill(row)
        return rows


def _allow(row: TokenMask, token_ids: Iterable[int]) -> None:
    for token in token_ids:
        row[token >> 5] |= np.uint32(1 << (token & 31))
