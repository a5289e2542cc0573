"""What an engine can serve at all, and the errors for what it cannot."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from cluster.config import EngineConfig
from cluster.engine.loading import self_check
from cluster.engine.memory.reach import Reach
from cluster.engine.work import Work
from cluster.errors import ConfigError, RequestError


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes no schedule can get around.  reach: which pages of a long text are needed."""

    vocab_size: int
    max_context_len: int
    num_pages: int
    reach: Reach
    max_rows: int

    @classmethod
    def of(
        cls, config: EngineConfig, max_context_len: int, vocab_size: int, num_pages: int,
        reach: Reach,
    ) -> Limits:  # fmt: skip
        """Raise ConfigError for sizes with which nothing could be served."""
        sizes = (
            ("num_pages", num_pages, -(-self_check.MIN_SLOTS // config.page_size)),
            ("max_batch_tokens", config.max_batch_tokens, self_check.MIN_ROWS),
            ("max_context_len", max_context_len, self_check.MIN_SLOTS),
        )
        for name, value, least in sizes:
            if value < least:
                raise ConfigError(
                    f"{name} is {value}, which is too small to serve anything; raise it to at "
                    f"least {least}",
                    param=name,
                )
        return cls(vocab_size, max_context_len, num_pages, reach, config.max_batch_tokens)

    @property
    def longest_context(self) -> int:
        """Tokens of the longest text that can be served."""
        if self._most_pages(self.max_context_len, self.max_rows) <= self.num_pages:
            return self.max_context_len
        return min(self.max_context_len, self.num_pages * self.reach.page_size)

    def _most_pages(self, context_len: int, num_nodes: int) -> int:
        return self.reach.most_pages(context_len + num_nodes, self.max_rows + num_nodes)

    def digest(self, config: EngineConfig, model_hash: str) -> int:
        """int64: of all that decides how a group of ranks schedules, and of what it serves."""
        told = repr((self, config.max_running_sequences, config.prefix_cache, model_hash))
        digest = hashlib.blake2b(told.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little", signed=True)

    def refusal(self, work: Work) -> RequestError | None:
        """The error for a work that makes no sense or that no schedule can ever run."""
        return _malformed(work, self.vocab_size) or self._too_large(work)

    def _too_large(self, work: Work) -> RequestError | None:
        if work.context_len > self.max_context_len:
            return RequestError(
                f"the context has {work.context_len} tokens, the limit is {self.max_context_len}; "
                "shorten it or raise engine.max_context_len"
            )
        if self._most_pages(work.context_len, len(work.tree)) > self.num_pages:
            return RequestError(
                f"{work.context_len} tokens and {len(work.tree)} draft nodes need more than all "
                f"{self.num_pages} pages of {self.reach.page_size} tokens; shorten the text or "
                "raise engine.num_pages"
            )
        if work.num_new_nodes + 1 > self.max_rows:
            return RequestError(
                f"{work.num_new_nodes} draft nodes do not fit one step of {self.max_rows} rows; "
                "send fewer or raise engine.max_batch_tokens"
            )
        return None


def _malformed(work: Work, vocab_size: int) -> RequestError | None:
    """The error for a work that makes no sense; its arrays may come from another machine."""
    tree = work.tree
    if work.base_len < 0:
        return RequestError(f"base_len {work.base_len} is negative")
    if not 0 <= work.num_cached_nodes <= len(tree) or (work.num_cached_nodes and len(work.delta)):
        return RequestError(
            f"num_cached_nodes {work.num_cached_nodes} with a tree of {len(tree)} nodes and a "
            f"delta of {len(work.delta)} tokens; cached nodes need an empty delta"
        )
    if len(tree.parents) != len(tree):
        return RequestError(f"a tree has {len(tree)} token ids and {len(tree.parents)} parents")
    orphans = (tree.parents >= np.arange(len(tree))) | (tree.parents < -1)
    if orphans.any():
        node = int(orphans.argmax())
        return RequestError(
            f"node {node} has parent {int(tree.parents[node])}; parents stand before children"
        )
    for name, token_ids in (("delta", work.delta), ("tree", tree.token_ids)):
        if len(token_ids) and not 0 <= token_ids.min() <= token_ids.max() < vocab_size:
            return RequestError(
                f"the {name} holds token ids outside the vocabulary 0..{vocab_size - 1}"
            )
    return None
