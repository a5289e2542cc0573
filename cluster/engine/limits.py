"""The limits of what an engine can serve at all, and the errors for works beyond them."""

from __future__ import annotations

import hashlib
from collections.abc import Container

import numpy as np

from cluster.config.schema import EngineConfig
from cluster.engine.loading.inspection import check_sizes
from cluster.engine.memory.kv_cache import LayerGroup, Reach
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

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        max_context_len: int,
        vocab_size: int,
        num_pages: tuple[int, ...],
        groups: tuple[LayerGroup, ...],
    ) -> EngineLimits:
        """Raise ConfigError for sizes with which nothing could be served."""
        check_sizes(config, max_context_len, min(num_pages))
        reaches = tuple(group.reach for group in groups)
        return cls(vocab_size, max_context_len, num_pages, reaches, config.max_batch_tokens)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text that can be served."""
        longest = self.max_context_len
        for reach, num_pages in zip(self.reaches, self.num_pages, strict=True):
            if self._most_pages(reach, self.max_context_len, self.max_rows) > num_pages:
                longest = min(longest, num_pages * reach.page_size)
        return longest

    def _most_pages(self, reach: Reach, context_len: int, num_nodes: int) -> int:
        return reach.most_pages(context_len + num_nodes, self.max_rows + num_nodes)

    def digest(self, config: EngineConfig, model_hash: str) -> int:
        """An int64 digest of all that decides how a group of ranks schedules, and of its model."""
        told = repr((self, config.max_running_sequences, config.prefix_cache, model_hash))
        digest = hashlib.blake2b(told.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def refusal(self, work: Work, adapters: Container[int]) -> RequestError | None:
        """The error for a work that no schedule can ever run, or that asks for what there is not.

        adapters: the indices that rows may have.
        The shapes of trees are checked where they come in (`cluster.spec.tree_check`)."""
        if work.adapter not in adapters:
            return RequestError(
                f"adapter {work.adapter} is asked for, which is not loaded; use 0 for none or the "
                "index of one that is"
            )
        too_large = self.too_large(work.context_len, len(work.tree))
        return self._foreign(work) or too_large or self._too_wide(work)

    def too_large(self, context_len: int, num_nodes: int) -> RequestError | None:
        """The error for a text with live nodes behind it that the cache can never hold."""
        if context_len > self.max_context_len:
            return ContextLengthError(
                f"the context has {context_len} tokens, the limit is {self.max_context_len}; "
                "shorten it or raise engine.max_context_len"
            )
        for reach, num_pages in zip(self.reaches, self.num_pages, strict=True):
            if self._most_pages(reach, context_len, num_nodes) > num_pages:
                return ContextLengthError(
                    f"{context_len} tokens and {num_nodes} draft nodes need more than "
                    f"all {num_pages} pages of {reach.page_size} tokens; shorten the text or raise "
                    "engine.num_pages"
                )
        return None

    def _foreign(self, work: Work) -> RequestError | None:
        for name, token_ids in (("delta", work.delta), ("tree", work.tree.token_ids)):
            # One comparison for both ends: a negative id is a large one without its sign.
            if len(token_ids) and token_ids.view(np.uint32).max() >= self.vocab_size:
                return RequestError(
                    f"the {name} holds token ids outside the vocabulary 0..{self.vocab_size - 1}"
                )
        return None

    def _too_wide(self, work: Work) -> RequestError | None:
        if work.num_new_nodes + 1 > self.max_rows:
            return RequestError(
                f"{work.num_new_nodes} draft nodes do not fit one step of {self.max_rows} rows; "
                "send fewer or raise engine.max_batch_tokens"
            )
        return None
