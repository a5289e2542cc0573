"""The seam for what edits a sequence's processed logits before its tokens are drawn: a grammar's
masks, for instance."""

from __future__ import annotations

from typing import Protocol

import torch

from cluster.core import TokenArray, TokenTree


class LogitsHook(Protocol):
    """One sequence's; it is told of its text, and edits the rows of each of its steps.

    What it does to a row must depend on the text before that row alone: else drafts would change
    what is emitted.  Reported log-probabilities are those of the raw law, without it.
    """

    def extend(self, base_len: int, token_ids: TokenArray) -> None:
        """The text, its prompt included, is now its first `base_len` tokens and these.  A smaller
        base_len than before is a rollback; 0 begins anew."""
        ...

    def __call__(self, logits: torch.Tensor, tree: TokenTree) -> None:
        """Edit in place; nothing may be raised.

        logits: float32[1 + nodes, vocab], after the text and then after each node of the tree, with
        bias, penalties and bans applied, before temperature and truncation.  -inf makes a token
        impossible; a row that is -inf throughout ends the request with an error.
        """
        ...
