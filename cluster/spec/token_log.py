"""The tokens of one sequence with the hash of each prefix; every component's copy of a text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cluster.core import EMPTY_TOKENS, TokenArray

HashArray = npt.NDArray[np.uint64]

# poly64, the prefix hash: h(empty) = 0 and h(s + [t]) = h(s) * MULTIPLIER + t + 1 (mod 2^64).
# It recognises stale and duplicated frames; it is no defence against a malicious peer.
PREFIX_HASH_MULTIPLIER = 0x9E3779B97F4A7C15
_MASK64 = (1 << 64) - 1
_INVERSE_MULTIPLIER = pow(PREFIX_HASH_MULTIPLIER, -1, 1 << 64)

# Below so many tokens a loop is faster than the vectorised hash.
_SHORT = 24


def prefix_hash(token_ids: Sequence[int] | TokenArray) -> int:
    """Return poly64 of `token_ids`."""
    value = 0
    for token in token_ids:
        value = (value * PREFIX_HASH_MULTIPLIER + int(token) + 1) & _MASK64
    return value


def prefix_hashes(token_ids: TokenArray, start: int = 0) -> HashArray:
    """poly64 after each token, continued from the hash `start` of the tokens before them.

    uint64[n].  The recurrence is unrolled with the multiplier's inverse, h(i) = M^(i+1) * (start +
    sum of (t_j + 1) * M^-(j+1)), so that a long prompt costs no Python loop.
    """
    num_tokens = len(token_ids)
    powers = np.cumprod(np.full(num_tokens, PREFIX_HASH_MULTIPLIER, dtype=np.uint64))
    inverses = np.cumprod(np.full(num_tokens, _INVERSE_MULTIPLIER, dtype=np.uint64))
    terms = (token_ids.astype(np.int64) + 1).astype(np.uint64) * inverses
    return powers * (np.cumsum(terms, dtype=np.uint64) + np.uint64(start))


def common_prefix_len(left: TokenArray, right: TokenArray) -> int:
    """The number of leading tokens that agree."""
    length = min(len(left), len(right))
    if not length:
        return 0
    differs = np.flatnonzero(left[:length] != right[:length])
    return int(differs[0]) if len(differs) else length


class TokenLog:
    """Tokens that are appended and cut off at the end, with poly64 at every length.

    Appending costs amortised O(tokens appended), truncating O(1).  Views that were handed out stay
    valid and unchanged while tokens are appended; those of tokens that were cut off do not.
    """

    __slots__ = ("_hashes", "_len", "_tokens")

    def __init__(self, token_ids: TokenArray = EMPTY_TOKENS) -> None:
        self._tokens, self._hashes = EMPTY_TOKENS, np.zeros(1, np.uint64)
        self._len = 0
        self._grow(max(len(token_ids), 1))  # EMPTY_TOKENS is not to be written to
        self.append(token_ids)

    def __len__(self) -> int:
        return self._len

    @property
    def token_ids(self) -> TokenArray:
        """int32[len]; a view."""
        return self._tokens[: self._len]

    def hash_at(self, length: int) -> int:
        """poly64 of the first `length` tokens."""
        return self._hashes.item(length)

    def since(self, start: int, stop: int | None = None) -> TokenArray:
        """The tokens [start, stop) as a view; stop None = all there are."""
        return self._tokens[start : self._len if stop is None else min(stop, self._len)]

    def ends_with(self, token_ids: TokenArray, start: int) -> bool:
        """True if the tokens from `start` to the end are exactly `token_ids`."""
        return start + len(token_ids) == self._len and bool(
            np.array_equal(self._tokens[start : self._len], token_ids)
        )

    def append(self, token_ids: TokenArray) -> None:
        start, end = self._len, self._len + len(token_ids)
        if end > len(self._tokens):
            self._grow(end)
        self._tokens[start:end] = token_ids
        hashes, value = self._hashes, self.hash_at(start)
        if end - start >= _SHORT:
            hashes[start + 1 : end + 1] = prefix_hashes(token_ids, value)
        else:
            for index, token in enumerate(token_ids.tolist(), start + 1):
                value = (value * PREFIX_HASH_MULTIPLIER + token + 1) & _MASK64
                hashes[index] = value
        self._len = end

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self._len = min(self._len, length)

    def _grow(self, needed: int) -> None:
        """Move to larger arrays, so that views of the former ones stay unchanged."""
        num_more = max(needed - len(self._tokens), len(self._tokens))
        self._tokens = np.concatenate((self._tokens, np.empty(num_more, np.int32)))
        self._hashes = np.concatenate((self._hashes, np.empty(num_more, np.uint64)))
