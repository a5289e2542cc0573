"""The seam for what edits a sequence's processed logits before its tokens are drawn: a grammar's
masks, for instance."""

from __future__ import annotations

from collections.abc import Sequence
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
        base_len than before is a rollback; 0 begins anew.

        Raises RequestError where the text is none that the hook could have let through.
        """
        ...

    def prepare(self, tree: TokenTree) -> Sequence[int] | None:
        """The nodes of `tree` that may be drawn after the text, ascending, each with its parent;
        None = all.  The others are not verified.

        What takes long is begun here, and goes on beside the forward pass.
        """
        ...

    def __call__(self, logits: torch.Tensor, tree: TokenTree) -> None:
        """Edit in place; raises RequestError where the request cannot go on.

        tree: what is left of the prepared one.

        logits: float32[1 + nodes, vocab], after the text and then after each node of the tree, with
        bias, penalties and bans applied, before temperature and truncation.  -inf makes a token
        impossible; a row that is -inf throughout ends the request with an error.
        """
        ...
