"""Holds the draws of one request to its grammar: a `LogitsHook`.

The masks, one for every node, are computed in another thread while the forward pass runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np

from cluster.core import TokenArray, TokenTree
from cluster.errors import RequestError
from cluster.grammar.base import MaskRow, mask_words
from cluster.grammar.text import ConstrainedText


class GrammarHook:
    """Makes impossible what the grammar forbids after each node of a tree."""

    def __init__(self, text: ConstrainedText, prompt_len: int, executor: Executor) -> None:
        self._text = text
        self._prompt_len = prompt_len
        self._executor = executor
        self._vocab_size = text.vocab_size
        self._masks: Future[MaskRow] | None = None

    def extend(self, base_len: int, token_ids: TokenArray) -> None:
        """See `LogitsHook.extend`."""
        self._settle()
        self._text.truncate(max(base_len - self._prompt_len, 0))
        for token in token_ids[max(self._prompt_len - base_len, 0) :].tolist():
            if not self._text.push(token):
                raise RequestError(
                    f"output token {len(self._text)} is not one that the request's grammar allows; "
                    "resume with the tokens and the grammar of the first stream",
                    param="grammar",
                )

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        """See `LogitsHook.prepare`."""
        self._settle()
        nodes = self._text.possible(tree)
        self._masks = self._executor.submit(self._fill, tree, nodes)
        return nodes

    def masks(self) -> MaskRow:
        """See `LogitsHook.masks`."""
        assert self._masks is not None, "prepare comes first"
        return self._masks.result()

    def _fill(self, tree: TokenTree, nodes: Sequence[int]) -> MaskRow:
        words = mask_words(self._vocab_size)
        rows: MaskRow = np.empty((len(tree) + 1, words), dtype=np.uint32)
        self._text.fill_all(tree, rows)
        return rows if len(nodes) == len(tree) else rows[[0, *(node + 1 for node in nodes)]]

    def _settle(self) -> None:
        """The other thread is done with the text; what it has found or raised is let go of."""
        masks, self._masks = self._masks, None
        if masks is not None:
            masks.exception()
