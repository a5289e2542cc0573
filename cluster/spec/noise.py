"""Counter-based Gumbel noise: a pure function of (seed, output position, token id, stream).

The integers come from Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), so there is no generator state to keep, to send or to lose.  `noise_torch` draws the
same integers on any device; committed test vectors hold both to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import FloatArray

Words = npt.NDArray[np.uint64]  # 32-bit words, held in 64 bits so that products do not overflow

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS = 10
MASK32 = 0xFFFFFFFF

# Elements per pass: the six working arrays of a pass stay within the second-level cache.
_CHUNK = 4096
# Of rows of a whole vocabulary that are kept, in bytes: 670 of 50,000 tokens.
_MAX_KEPT = 2**27


def split_seeds(seeds: npt.ArrayLike) -> tuple[Words, Words]:
    """Split 64-bit seeds into Philox keys: (low words, high words).  Seeds count modulo 2^64."""
    if isinstance(seeds, np.ndarray) and seeds.dtype.kind in "iu":
        whole = seeds.astype(np.uint64)
    else:
        # Python integers from 2^63 on do not fit NumPy's default integer.
        flat = [int(seed) & 0xFFFFFFFFFFFFFFFF for seed in np.asarray(seeds, dtype=object).flat]
        whole = np.array(flat, dtype=np.uint64).reshape(np.shape(seeds))
    return whole & np.uint64(MASK32), whole >> np.uint64(32)


def philox(
    counter: tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike, npt.ArrayLike],
    key: tuple[npt.ArrayLike, npt.ArrayLike],
) -> tuple[Words, Words, Words, Words]:
    """Philox4x32-10.  counter, key: 32-bit words, broadcast against each other."""
    words = [np.asarray(word, dtype=np.uint64) for word in (*counter, *key)]
    shape = np.broadcast_shapes(*(word.shape for word in words))
    # The two halves of a round run as one pass over pairs: [2, *shape].
    pair = (2, *(1 for _ in shape))
    factors = np.array(MULTIPLIERS, dtype=np.uint64).reshape(pair)
    keys = np.stack(np.broadcast_arrays(words[4], words[5]))
    keys = keys.reshape(2, *(1 for _ in range(len(shape) + 1 - keys.ndim)), *keys.shape[1:])
    steps = np.array(KEY_STEPS, dtype=np.uint64).reshape(pair)
    factored, mixed = np.empty((2, *shape), np.uint64), np.empty((2, *shape), np.uint64)
    factored[0], factored[1], mixed[0], mixed[1] = words[0], words[2], words[1], words[3]
    product = np.empty_like(factored)
    half, mask = np.uint64(32), np.uint64(MASK32)
    for _ in range(NUM_ROUNDS):
        np.multiply(factored, factors, out=product)
        np.right_shift(product[::-1], half, out=factored)
        np.bitwise_xor(factored, mixed, out=factored)
        np.bitwise_xor(factored, keys, out=factored)
        np.bitwise_and(product[::-1], mask, out=mixed)
        keys = (keys + steps) & mask
    return factored[0], mixed[0], factored[1], mixed[1]


def gumbel(
    seed: npt.ArrayLike,
    position: npt.ArrayLike,
    token_ids: npt.ArrayLike,
    stream: npt.ArrayLike = 0,
) -> FloatArray:
    """Standard Gumbel noise, float32 of the arguments' broadcast shape.

    seed: 64-bit integers.  position: index among the *output* tokens of the token to be drawn.
    token_ids: of the target's vocabulary.  stream: sample index when a prompt is sampled n times.
    """
    words = philox((token_ids, position, stream, 0), split_seeds(seed))[0]
    return _gumbel_of_words(words)


def gumbel_rows(
    seeds: Sequence[int], positions: Sequence[int], streams: Sequence[int], vocab_size: int
) -> FloatArray:
    """Noise over the whole vocabulary: float32[rows, vocab_size], one row per triple."""
    triples = zip(seeds, positions, streams, strict=True)
    row_of = _kept(vocab_size)
    return np.stack([row_of(*triple) for triple in triples])


@functools.cache
def _kept(vocab_size: int) -> Callable[[int, int, int], FloatArray]:
    """`gumbel_row` of a vocabulary, with its last rows kept."""
    make = functools.partial(gumbel_row, vocab_size=vocab_size)
    return functools.lru_cache(_MAX_KEPT // (4 * vocab_size) + 1)(make)


def gumbel_row(seed: int, position: int, stream: int, vocab_size: int) -> FloatArray:
    """Noise over the whole vocabulary, float32[vocab_size]; it is kept, so only to be read.

    Nodes at one depth of a tree have the same row, and so do the deeper ones of a step and the
    first ones of the next.
    """
    token_ids = np.arange(vocab_size, dtype=np.uint64)
    noise = np.empty(vocab_size, dtype=np.float32)
    for start in range(0, vocab_size, _CHUNK):
        part = slice(start, start + _CHUNK)
        noise[part] = gumbel(seed, position, token_ids[part], stream)
    noise.setflags(write=False)
    return noise


def _gumbel_of_words(words: Words) -> FloatArray:
    """G = -log(E), E = -log1p(-U), U = (x + 0.5) * 2^-32; float64 until the last step."""
    values = np.array(words, dtype=np.float64)
    np.add(values, 0.5, out=values)
    np.multiply(values, -(2.0**-32), out=values)
    np.log1p(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)
    return values.astype(np.float32)
