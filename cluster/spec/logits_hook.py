"""The seam for what decides which of a sequence's tokens may be drawn at all: a grammar, say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from cluster.core import TokenArray, TokenTree

# One bit per token of the vocabulary, the lowest bit first: uint32[rows, ceil(vocab / 32)].
TokenMask = npt.NDArray[np.uint32]


class LogitsHook(Protocol):
    """One sequence's; it is told of its text, and masks the rows of each of its steps.

    What it forbids at a row must depend on the text before that row alone: else drafts would change
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

        What takes long is begun here, and goes on beside the forward pass.  Raises as `masks`.
        """
        ...

    def masks(self) -> TokenMask:
        """What may be drawn after the text, and then after each node that is left of the prepared
        tree, contiguous.  A row without a token ends the request with an error.

        Raises RequestError where the request cannot go on.
        """
        ...


def forbid(logits: torch.Tensor, masks: TokenMask, *, may_be_banned: bool) -> None:
    """Make impossible, in place, what `masks` leaves out.  logits: float32[rows, vocab].

    may_be_banned: tokens were made impossible before.  Where those are all that a mask allows, the
    mask goes before: a grammar's end before min_tokens.
    """
    forbidden = _forbidden(masks, logits)
    logits.masked_fill_(forbidden, -torch.inf)
    if may_be_banned:
        dead = (logits.amax(dim=1) == -torch.inf).unsqueeze(1)
        logits.masked_fill_(dead & ~forbidden, 0.0)


def _forbidden(masks: TokenMask, logits: torch.Tensor) -> torch.Tensor:
    """bool[rows, vocab] on the logits' device: the bits that are clear."""
    vocab_size = logits.shape[1]
    if logits.device.type == "cpu":
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=vocab_size, bitorder="little")
        return torch.from_numpy(bits == 0)
    return clear_bits(torch.from_numpy(masks.view(np.int32)).to(logits.device), vocab_size)


def clear_bits(words: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """The same on any device, where the mask travels as words.  words: int32[rows, words]."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    allowed = (words.unsqueeze(2) >> shifts) & 1  # [rows, words, 32]
    return allowed.flatten(1)[:, :vocab_size] == 0
