"""The interface of a hook, e.g. of a grammar, that decides which tokens may be drawn at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenArray, TokenTree
from cluster.spec.transfer import sent

# One bit per token of the vocabulary, the lowest bit first: uint32[rows, ceil(vocab / 32)].
TokenMask = npt.NDArray[np.uint32]


class LogitsHook(Protocol):
    """The hook of one sequence: it is told of the text, and masks the rows of each step.

    The tokens that it forbids at a row must depend only on the text before that row; otherwise
    drafts would change the output.  Reported log-probabilities ignore the hook: they are those of
    the raw law.
    """

    def extend(self, token_ids: TokenArray) -> None:
        """Append `token_ids` to the output so far.

        Raises RequestError if the hook would not have allowed the text.
        """
        ...

    def prepare(self, tree: TokenTree) -> Sequence[int]:
        """Return the nodes of `tree` that may be drawn after the text, ascending, each with its
        parent.  The others are not verified.

        Raises as `masks`.
        """
        ...

    def masks(self) -> TokenMask:
        """Return the masks of the tokens that may be drawn after the text, and then after each
        node that is left of the prepared tree.  Contiguous.  A row that allows no token ends the
        request with an error.

        Raises RequestError if the request cannot go on.
        """
        ...


def forbid(logits: torch.Tensor, masks: TokenMask, *, may_be_banned: bool) -> None:
    """Make the tokens that `masks` does not allow impossible, in place.

    logits: float32[rows, vocab].  may_be_banned: some tokens may be impossible already.  If a mask
    allows only such tokens, the mask wins: a text may end by its grammar before min_tokens.
    """
    forbidden = clear_bits(masks, logits)
    logits.masked_fill_(forbidden, -torch.inf)
    if may_be_banned:
        dead = (logits.amax(dim=1) == -torch.inf).unsqueeze(1)
        logits.masked_fill_(dead & ~forbidden, 0.0)


def clear_bits(masks: TokenMask, logits: torch.Tensor) -> torch.Tensor:
    """Return the tokens whose bits are clear: bool[rows, vocab] on the logits' device."""
    words = sent(masks.view(np.int32), logits.device)
    shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (words.unsqueeze(2) >> shifts) & 1  # [rows, words, 32]
    return allowed.flatten(1)[:, : logits.shape[1]] == 0
