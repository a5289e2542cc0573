"""Counter-based Gumbel noise: a pure function of (seed, output position, token id, stream).

The integers come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), so there is no generator state to keep, to send or to lose.  `draw` draws the
same integers on any device; committed test vectors hold both to it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray

Words = npt.NDArray[np.uint64]  # 32-bit words, held in 64 bits so that products do not overflow

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_NUM_ROUNDS = 10
MASK32 = 0xFFFFFFFF

# Rows of a whole vocabulary that are kept: 32 texts with trees of depth 4 read 160 in a step, most
# of them again in the next one.  256 of 50,000 tokens take 51 MB.
_NUM_KEPT = 256


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[Any, Any]) -> tuple[Any, Any, Any, Any]:
    """Philox4x32-10.  counter, key: 32-bit words, broadcast against each other.

    They are held in 64 bits, NumPy's without and torch's with a sign: there a product of two words
    wraps into the sign, but its bits are right, and the mask after the arithmetic shift drops the
    copies of the sign.
    """
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(_NUM_ROUNDS):
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((p1 >> 32) & MASK32) ^ c1 ^ k0, p1 & MASK32
        c2, c3 = ((p0 >> 32) & MASK32) ^ c3 ^ k1, p0 & MASK32
        k0, k1 = (k0 + _KEY_STEPS[0]) & MASK32, (k1 + _KEY_STEPS[1]) & MASK32
    return c0, c1, c2, c3


def random_words(
    seeds: npt.ArrayLike, counter: Iterable[npt.ArrayLike]
) -> tuple[Words, Words, Words, Words]:
    """The four words of Philox for 64-bit seeds and four-word counters, broadcast against each
    other."""
    key, c0, c1, c2, c3 = (np.asarray(each, dtype=np.uint64) for each in (seeds, *counter))
    return philox((c0, c1, c2, c3), (key & np.uint64(MASK32), key >> np.uint64(32)))


def gumbel(
    seed: npt.ArrayLike,
    position: npt.ArrayLike,
    token_ids: npt.ArrayLike,
    stream: npt.ArrayLike = 0,
) -> FloatArray:
    """Standard Gumbel noise, float32 of the arguments' broadcast shape.

    G = -log(E), E = -log1p(-U), U = (x + 0.5) * 2^-32; float64 until the last step.

    seed: 64-bit integers.  position: index among the *output* tokens of the token to be drawn.
    token_ids: of the target's vocabulary.  stream: sample index when a prompt is sampled n times.
    """
    words = random_words(seed, (token_ids, position, stream, 0))[0]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return (-np.log(-np.log1p(-uniform))).astype(np.float32)


@functools.lru_cache(_NUM_KEPT)
def gumbel_row(seed: int, position: int, stream: int, vocab_size: int) -> FloatArray:
    """Noise over the whole vocabulary, float32[vocab_size]; it is kept, so only to be read.

    Nodes at one depth of a tree have the same row, and so do the deeper ones of a step and the
    first ones of the next.
    """
    noise = gumbel(seed, position, np.arange(vocab_size, dtype=np.uint64), stream)
    noise.setflags(write=False)
    return noise
