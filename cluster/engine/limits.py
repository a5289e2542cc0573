"""The limits of what an engine can serve at all, and the errors for works beyond them."""

from __future__ import annotations

from collections.abc import Container, Iterator

import numpy as np

from cluster.engine.memory.kv_cache import Reach
from cluster.engine.work import Work
from cluster.errors import ContextLengthError, RequestError
from cluster.records import frozen


@frozen
class EngineLimits:
    """The sizes no schedule can get around.

    num_pages, reaches: of each group of layers, its pages and which ones a long text needs."""

    vocab_size: int
    max_context_len: int
    num_pages: tuple[int, ...]
    reaches: tuple[Reach, ...]
    max_rows: int

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text that can be served."""
        short = self._short_of_pages(self.max_context_len, self.max_rows)
        return min([self.max_context_len, *(pages * reach.page_size for reach, pages in short)])

    def _short_of_pages(self, context_len: int, num_nodes: int) -> Iterator[tuple[Reach, int]]:
        """The groups, with their pages, that cannot hold such a text."""
        for reach, num_pages in zip(self.reaches, self.num_pages, strict=True):
            if reach.most_pages(context_len + num_nodes, self.max_rows + num_nodes) > num_pages:
                yield reach, num_pages

    def refusal(self, work: Work, adapters: Container[int]) -> RequestError | None:
        """The error for a work that no schedule can ever run, or that asks for what there is not.

        adapters: the indices that rows may have.
        The shapes of trees are checked where they come in (`cluster.spec.tree_check`)."""
        if work.adapter not in adapters:
            return RequestError(
                f"adapter {work.adapter} is asked for, which is not loaded; use 0 for none or the "
                "index of one that is"
            )
        for name, token_ids in (("delta", work.delta), ("tree", work.tree.token_ids)):
            # One comparison for both ends: a negative id is a large one without its sign.
            if len(token_ids) and token_ids.view(np.uint32).max() >= self.vocab_size:
                return RequestError(
                    f"the {name} holds token ids outside the vocabulary 0..{self.vocab_size - 1}"
                )
        error = self.too_large(work.context_len, len(work.tree))
        if error is None and work.num_new_nodes + 1 > self.max_rows:
            error = RequestError(
                f"{work.num_new_nodes} draft nodes do not fit one step of {self.max_rows} rows; "
                "send fewer or raise engine.max_batch_tokens"
            )
        return error

    def too_large(self, context_len: int, num_nodes: int) -> RequestError | None:
        """The error for a text with live nodes behind it that the cache can never hold."""
        if context_len > self.max_context_len:
            return ContextLengthError(
                f"the context has {context_len} tokens, the limit is {self.max_context_len}; "
                "shorten it or raise engine.max_context_len"
            )
        for reach, num_pages in self._short_of_pages(context_len, num_nodes):
            return ContextLengthError(
                f"{context_len} tokens and {num_nodes} draft nodes need more than "
                f"all {num_pages} pages of {reach.page_size} tokens; shorten the text or raise "
                "engine.num_pages"
            )
        return None
