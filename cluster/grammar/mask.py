"""Masks: one bit per token of the vocabulary, the lowest bit first."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# uint32[words]
MaskRow = npt.NDArray[np.uint32]


def mask_words(vocab_size: int) -> int:
    """The width of a mask, in words of 32 tokens."""
    return -(-vocab_size // 32)
